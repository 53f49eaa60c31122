"""Exit codes of all `controller` commands."""

from enum import IntEnum


class Exit(IntEnum):
    """Every exit code; docs/command-line.md explains them."""

    DONE = 0  # done; what runs until it is stopped was stopped
    FAILED = 1  # the answer is no (`doctor`, `replay`), or anything else went wrong
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
    DENIED = 12  # the caller may not do this, or may not open the socket
    NOT_FOUND = 13  # no such override, no such profile
    INTERRUPTED = 130  # SIGINT
    BROKEN_PIPE = 141  # nobody reads the output any more
    TERMINATED = 143  # SIGTERM
