"""Defines the errors of recordings."""

from controller.core.errors import SpeculationError


class RecordingError(SpeculationError):
    """A recording is missing, damaged, or not a recording at all."""


class RecordDirectoryError(SpeculationError):
    """The directory of recordings cannot be used."""
