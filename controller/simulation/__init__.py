"""Proves decisions: a decode engine in virtual time drives the production core, and every peer."""
