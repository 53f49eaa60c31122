"""Simulates a decode engine in virtual time that runs the production core and every peer."""

__version__ = "0.1.0"
