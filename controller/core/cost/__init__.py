"""Estimates of how long a decode step takes, per batch size, draft length and drafter."""
