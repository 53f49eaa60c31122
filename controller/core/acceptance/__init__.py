"""Estimates of how many drafted tokens the target accepts."""
