"""What all tests share."""

import gc
import os
import signal
from contextlib import ExitStack

import pytest
from hypothesis import settings

from tests.support.dealing import without_constants_of_modules
from tests.support.hang_guard import guard

# Matrices as small as those of tests only wait for each other on more threads.  Read by torch and
# by numpy while they are imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Two busy cores make any single example slow at times; the number of examples is the budget.  They
# are the same in every run, so that a run that fails says something of what was changed.
settings.register_profile("default", deadline=None, derandomize=True)
# New examples in every run, to look for unforeseen cases (--hypothesis-profile=explore).
settings.register_profile("explore", deadline=None)
settings.load_profile("default")

# A shell's background job ignores Ctrl-C, and would hand that on to every program of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The first is for `tests/system/abuse`."""
    parser.addoption("--hostile-scale", type=int, default=1, help="factor of the attacks' size")
    parser.addoption(
        "--reversed-files",
        action="store_true",
        help="the last file first, which shows tests that need another file's to run before",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Ends and names tests that hang; draws do not depend on what other tests have imported."""
    guard(config)
    draws = ExitStack()
    draws.enter_context(without_constants_of_modules())
    config.add_cleanup(draws.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests first: workers beside each other then end at about the same time."""
    if config.getoption("reversed_files"):
        place = {path: number for number, path in enumerate(dict.fromkeys(i.path for i in items))}
        items.sort(key=lambda item: -place[item.path])
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What test modules have imported stays: no garbage collection looks at it again.

    torch and SGLang alone are a million objects, which every full collection would go through.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At its end the process collects everything, or libraries would complain of what is left."""
    gc.unfreeze()
