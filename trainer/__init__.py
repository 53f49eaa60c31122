"""Trains drafters outside of an engine: on captured signals, for SpecForge, and for SD²."""

__version__ = "0.1.0"
