"""Reproduces figures that the papers state."""
