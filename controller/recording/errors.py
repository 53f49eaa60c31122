"""Defines the errors of recordings."""

from controller.core.errors import SpeculationError


class RecordingError(SpeculationError):
    """A recording that is none, is damaged where it must not be, or is not there."""


class RecordDirectoryError(SpeculationError):
    """The directory of recordings cannot be used."""
