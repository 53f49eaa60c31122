"""Runs inside or beside an engine: the link to the sidecar, the hooks in SGLang, training."""

__version__ = "0.1.0"
