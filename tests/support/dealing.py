"""Draws of hypothesis that are the same in every run, whatever else was imported."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import TypeVar
from unittest.mock import patch

from hypothesis.errors import StopTest, UnsatisfiedAssumption
from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.internal.constants_ast import Constants
from hypothesis.strategies import SearchStrategy

_Drawn = TypeVar("_Drawn")


def draw_number(strategy: SearchStrategy[_Drawn], number: int) -> _Drawn | None:
    """The draw of that number, which depends on no other; None if the strategy rejects it.

    Hypothesis makes its draws depend on one another, and begins with the simplest one.
    """
    with without_constants_of_modules():
        try:
            return ConjectureData(random=Random(number)).draw(strategy)
        except (StopTest, UnsatisfiedAssumption):
            return None


@contextmanager
def without_constants_of_modules() -> Iterator[None]:
    """Hypothesis draws only numbers that the strategies name.

    It would also draw constants from the source of every module of this project that happens to be
    imported, so that draws would differ between a run of one file and a run of all tests.
    """
    with (
        patch.object(providers, "_get_local_constants", Constants),
        patch.object(providers, "CONSTANTS_CACHE", {}),
    ):
        yield
