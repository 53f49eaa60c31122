"""Stores what outlives a sidecar, overrides and their audit, in a file or in Redis."""
