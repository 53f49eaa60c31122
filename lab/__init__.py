"""Experiments, demos and checks that are never installed with the product."""
