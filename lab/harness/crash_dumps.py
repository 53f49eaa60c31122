"""Has an SGLang engine that crashes end at once.

SGLang's launcher first waits 5 seconds, runs py-spy on its schedulers, asks CUDA for a core dump of
each, and waits 60 seconds for those.  A run of the lab has its logs, and the memory of the device
is wanted for the next engine.
"""

from collections.abc import Mapping

_WITHOUT = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}


def without_crash_dumps(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that switch dumps off, but for those that the environment has."""
    return {name: value for name, value in _WITHOUT.items() if name not in environment}
