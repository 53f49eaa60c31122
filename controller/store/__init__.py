"""Stores the data that outlives a sidecar, such as overrides, in files or in Redis."""
