"""A block is drafted whole and handed on in part; a lookup does not search without need."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.vllm import draft_lengths, vllm_api
from engine_shim.vllm.draft_lengths import draft_whole_block, skip_lookup_at_zero


class Drafter:
    """Drafts the places of its tokens, and keeps how many it was asked for."""

    def __init__(self, full: int, *, with_probabilities: bool = False) -> None:
        self.speculative_config = SimpleNamespace(num_speculative_tokens=full)
        self.asked: list[int] = []
        self._last_draft_probs: torch.Tensor | None = None
        self._with_probabilities = with_probabilities

    def propose(self, num_speculative_tokens: int, *, rows: int) -> torch.Tensor:
        self.asked.append(num_speculative_tokens)
        if self._with_probabilities:
            self._last_draft_probs = torch.rand(rows, num_speculative_tokens, 4)
        return torch.arange(num_speculative_tokens).repeat(rows, 1)


@pytest.mark.parametrize(("gamma", "drafted"), [(0, 0), (1, 7), (5, 7), (7, 7)])
def test_a_block_has_its_full_length_whatever_is_wanted_of_it(gamma, drafted):
    drafter = Drafter(7, with_probabilities=True)
    block = draft_whole_block(Drafter.propose)(drafter, num_speculative_tokens=gamma, rows=2)
    assert block.tolist() == [list(range(gamma))] * 2
    assert drafter.asked == [drafted]
    assert drafter._last_draft_probs is not None
    assert drafter._last_draft_probs.shape == (2, gamma, 4)


def test_a_drafter_without_probabilities_has_none_afterwards():
    drafter = Drafter(7)
    draft_whole_block(Drafter.propose)(drafter, 3, rows=1)
    assert drafter._last_draft_probs is None


def test_a_lookup_that_is_asked_for_nothing_searches_nothing():
    searched: list[int] = []

    def propose(_: Any, number: int, sampled: Any, *rest: Any) -> Any:
        searched.append(number)
        return [[1] * number for _ in sampled]

    wrapped = skip_lookup_at_zero(propose)
    assert wrapped(None, 0, [[1], [2]], "more") == [[], []]
    assert searched == []
    assert wrapped(None, 2, [[1]], "more") == [[1, 1]]


MODULE = """
class Owner:
    def propose(self, number):
        return number
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(vllm_api, "require_contract", lambda _: None)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "late_module"
    sys.modules.pop("late_module", None)


def doubled(original: Any) -> Any:
    def propose(owner: Any, number: int) -> Any:
        return 2 * original(owner, number)

    propose.speculation_controller = True  # type: ignore[attr-defined]
    return propose


@pytest.mark.parametrize("early", [True, False], ids=["imported before", "imported later"])
def test_a_module_is_hooked_once_and_not_imported_for_it(module, early):
    if early:
        importlib.import_module(module)
    for _ in range(2):
        draft_lengths._wrap_after_import(f"{module}.Owner", "any", doubled)
    assert (module in sys.modules) is early
    assert importlib.import_module(module).Owner().propose(3) == 6
