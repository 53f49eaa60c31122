"""Listens, identifies callers and limits what they may send."""
