"""Finds out from an engine's reports what is wrong with it."""
