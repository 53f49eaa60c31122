"""Computes what papers state from their tables, and shows how close it comes."""
