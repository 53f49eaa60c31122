"""Runs every policy on every scenario and compares them, seed by seed."""
