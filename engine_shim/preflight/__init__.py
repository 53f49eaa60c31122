"""Tells from an engine's flags whether it would be steered, before anything is configured."""
