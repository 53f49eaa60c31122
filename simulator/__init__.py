"""Simulates a decode engine in virtual time, which drives the production core and every peer."""
