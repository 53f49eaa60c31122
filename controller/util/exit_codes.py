"""Exit codes of all `controller` commands."""

from enum import IntEnum


class Exit(IntEnum):
    """Every exit code; docs/command-line.md explains them."""

    DONE = 0  # the command succeeded, or was stopped if it runs until it is stopped
    FAILED = 1  # the answer is no (`doctor`, `replay`), or anything else went wrong
    USAGE = 2  # an option, a setting, the settings file, an input file
    MISMATCH = 3  # a profile of another engine
    NO_SIDECAR = 4  # no sidecar answers
    NO_ENGINE = 5  # the engine's HTTP API does not answer
    NOT_INTRODUCED = 6  # the sidecar does not know the engine, or knows several and none was named
    BROKE_OFF = 7  # a measurement ended without a result
    TAKEN = 8  # a socket or port is in use, or cannot be bound
    BAD_FILE = 9  # a file that a setting names cannot be used: profile, access list, certificate
    NO_STORE = 10  # the state directory or the store behind the overrides cannot be used
    NO_EFFECT = 11  # an override would have no effect on the engines of this sidecar
    DENIED = 12  # the caller lacks the permission, or may not open the socket
    NOT_FOUND = 13  # no such override, no such profile
    INTERRUPTED = 130  # SIGINT
    BROKEN_PIPE = 141  # the reader of the output has closed the pipe
    TERMINATED = 143  # SIGTERM
