"""Scenarios as files: their schema, their reader, and those of the standard suite."""
