"""Plays streams on paced engines, and tells what was gained and where time was lost."""
