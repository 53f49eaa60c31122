"""Trains drafters outside of an engine: on captured signals, for SpecForge, and for SD²."""
