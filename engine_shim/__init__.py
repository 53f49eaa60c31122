"""Runs inside or beside an engine: the link to the sidecar, the plugins of SGLang and vLLM."""

__version__ = "0.1.0"
