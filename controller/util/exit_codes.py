"""Exit codes of all `controller` commands."""

from enum import IntEnum


class Exit(IntEnum):
    """Every exit code; docs/lifecycle.md explains them.

    A signal that does not end a command cleanly gives 128 + its number.
    """

    DONE = 0  # done; `serve`: asked to stop, and stopped cleanly
    FAILED = 1  # refused, or anything else; `doctor`: a check failed
    USAGE = 2  # an option, a setting, the settings file, an input file
    MISMATCH = 3  # a profile of another engine
    NO_SIDECAR = 4  # no sidecar answers
    NO_ENGINE = 5  # the engine's HTTP API does not answer
    NOT_INTRODUCED = 6  # the engine is not known to the sidecar, or several are and none is named
    BROKE_OFF = 7  # a measurement that yielded no result
    TAKEN = 8  # a socket or port is in use, or cannot be bound
    BAD_FILE = 9  # a file that a setting names cannot be used: profile, access list, certificate
    NO_STORE = 10  # the state directory or the store behind the overrides cannot be used
    NO_EFFECT = 11  # an override that would do nothing to the engines of this sidecar
