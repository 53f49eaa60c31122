"""Measures C(drafter, B, gamma, kv) of a running engine through the shim, and fits its profile."""

from controller.profiling.errors import ProfilingError
from controller.profiling.run import ProfileOutcome, ProfileRequest, profile_engine
from controller.profiling.schedule import ProfilingSettings

__all__ = [
    "ProfileOutcome",
    "ProfileRequest",
    "ProfilingError",
    "ProfilingSettings",
    "profile_engine",
]
