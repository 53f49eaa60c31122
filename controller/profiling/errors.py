"""Defines why a profile cannot be measured or used; each kind has an exit code."""

from typing import ClassVar

from controller.core.errors import SpeculationError
from controller.util.exit_codes import Exit


class ProfilingError(SpeculationError):
    """The base of these errors; `exit_code` is what the command ends with."""

    exit_code: ClassVar[Exit] = Exit.FAILED


class ProfilingUsageError(ProfilingError):
    """An option that cannot work with this engine."""

    exit_code = Exit.USAGE


class ProfileRefusedError(ProfilingError):
    """The file at the output path is not a profile of this engine."""

    exit_code = Exit.MISMATCH


class CallerDeniedError(ProfilingError):
    """The sidecar refuses the caller, or the caller may not open its socket."""

    exit_code = Exit.DENIED


class SidecarUnreachableError(ProfilingError):
    """No sidecar answers."""

    exit_code = Exit.NO_SIDECAR


class EngineUnreachableError(ProfilingError):
    """The engine's HTTP API does not answer, or refuses what the measurement needs."""

    exit_code = Exit.NO_ENGINE


class EngineRefusedError(EngineUnreachableError):
    """The engine refuses a load."""


class EngineNotIntroducedError(ProfilingError):
    """The sidecar does not know which engine is meant: none, another one, or several."""

    exit_code = Exit.NOT_INTRODUCED


class MeasurementError(ProfilingError):
    """The measurement broke off, or nothing usable came out of it."""

    exit_code = Exit.BROKE_OFF


class MeasurementStalledError(MeasurementError):
    """Reports that count stopped coming; the message says what came instead."""


class OtherWidthError(MeasurementError):
    """The engine verifies another draft length than it is asked for: no cell would be true."""


class InvalidPartialError(ProfilingError):
    """A file of an interrupted measurement that cannot be read."""
