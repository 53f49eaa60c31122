"""Why a profile cannot be measured or used; each kind has an exit code for the command."""

from typing import ClassVar

from controller.core.errors import SpeculationError


class ProfilingError(SpeculationError):
    """Base; `exit_code` is what the command ends with."""

    exit_code: ClassVar[int] = 1


class ProfilingUsageError(ProfilingError):
    """An option that cannot work with this engine."""

    exit_code = 2


class ProfileRefusedError(ProfilingError):
    """The file at the output path is not a profile of this engine."""

    exit_code = 3


class SidecarUnreachableError(ProfilingError):
    """No sidecar answers."""

    exit_code = 4


class EngineUnreachableError(ProfilingError):
    """The engine's HTTP API does not answer, or refuses what the measurement needs."""

    exit_code = 5


class EngineRefusedError(EngineUnreachableError):
    """The engine refuses a load."""


class EngineNotIntroducedError(ProfilingError):
    """The sidecar does not know which engine is meant: none, another one, or several."""

    exit_code = 6


class MeasurementError(ProfilingError):
    """The measurement broke off, or nothing usable came out of it."""

    exit_code = 7


class MeasurementStalledError(MeasurementError):
    """Reports that count stopped coming; the message says what came instead."""


class InvalidPartialError(ProfilingError):
    """A file of an interrupted measurement that cannot be read."""
