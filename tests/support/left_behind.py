"""The processes that a run of the lab may leave behind."""

import psutil

import lab.harness.orphan_guard


def find_children() -> set[int]:
    """The ids of all descendants of this process, but for the lab's guard.

    The guard starts with the first process that the lab starts here, in whichever test that is, and
    stays until this process ends.
    """
    guard = lab.harness.orphan_guard.__file__
    return {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if guard not in _read_command(child)
    }


def _read_command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        # It has ended, or ends now: whoever reads it again does not find it.
        return []
