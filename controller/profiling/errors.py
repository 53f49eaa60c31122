"""Errors of measuring and using profiles; each has an exit code."""

from typing import ClassVar

from controller.core.errors import SpeculationError
from controller.util.exit_codes import Exit


class ProfilingError(SpeculationError):
    """The base of these errors; `exit_code` is what the command ends with."""

    exit_code: ClassVar[Exit] = Exit.FAILED


class ProfilingUsageError(ProfilingError):
    """An option is not valid for this engine."""

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
    """No engine, another engine or several engines are connected to the sidecar."""

    exit_code = Exit.NOT_INTRODUCED


class MeasurementError(ProfilingError):
    """The measurement failed, or has no usable result."""

    exit_code = Exit.BROKE_OFF


class MeasurementStalledError(MeasurementError):
    """No more usable reports arrive; the message names the reports that do."""


class OtherWidthError(MeasurementError):
    """The engine verifies another draft length than requested, so no cell would be valid."""


class InvalidPartialError(ProfilingError):
    """The file of an interrupted measurement cannot be read."""
