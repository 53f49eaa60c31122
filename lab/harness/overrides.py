"""Overrides the sidecar's policy for a while, as an operator does."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

from lab.harness.errors import HarnessError

# Only ends a hang.
_COMMAND_SECONDS: Final = 120.0
# A name is not taken twice.
_numbers = count()


@contextmanager
def overridden(address: str, *rule: str) -> Iterator[None]:
    """Sets a fleet-wide override with these options of `controller override set`, then clears it.

    address: of the sidecar.  Raises HarnessError where the sidecar refuses.
    """
    name = f"lab-{next(_numbers)}"
    author = ("--author", "lab", "--reason", "a measurement")
    _controller(address, "override", "set", "--id", name, "--fleet", *rule, *author)
    try:
        yield
    finally:
        _controller(address, "override", "clear", name, *author)


def _controller(address: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "controller.cli", *arguments, "--address", address],
        capture_output=True,
        text=True,
        check=False,
        timeout=_COMMAND_SECONDS,
    )
    if done.returncode:
        raise HarnessError(f"controller {' '.join(arguments)}: {done.stderr.strip()}")
