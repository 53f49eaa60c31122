"""The target's part of a state is built outside the drafter's scope, and the drafter's inside."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine_shim.sglang import graph_states
from engine_shim.sglang.api import sglang_api

scopes: list[str] = []


@contextmanager
def scope(name: str) -> Iterator[None]:
    # SGLang refuses to enter its scope twice.
    assert name not in scopes
    scopes.append(name)
    yield
    scopes.remove(name)


class Draft:
    """Notes where its parts are built."""

    def __init__(self) -> None:
        self.built: list[tuple[str, tuple[str, ...]]] = []

    def init_attention_backend(self) -> None:
        self.built.append(("attention", tuple(scopes)))

    def _capture_cuda_graphs(self) -> None:
        self.built.append(("graphs", tuple(scopes)))


class Controller:
    """Builds one state."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def init_states(self, cuda_graph_bs: list[int] | None = None) -> None:
        draft = self.worker.draft_worker
        draft.init_attention_backend()
        draft._capture_cuda_graphs()
        draft.built.append((f"target {cuda_graph_bs}", tuple(scopes)))


class Worker:
    """Builds its states in the drafter's scope, as SGLang does."""

    def __init__(self) -> None:
        self.draft_worker = Draft()
        self.adaptive_controller = Controller(self)

    def init_cuda_graphs(self) -> None:
        with scope("draft"):
            self.adaptive_controller.init_states(cuda_graph_bs=[1, 2])


@pytest.fixture(autouse=True)
def _scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_api, "draft_scope", lambda _: scope("draft"))
    monkeypatch.setattr(sglang_api, "draft_moe_scopes", lambda: (scope("experts"),))


def test_each_part_is_built_in_its_own_scope() -> None:
    worker = Worker()
    graph_states.around_init_cuda_graphs(Worker.init_cuda_graphs, worker)
    inside = ("draft", "experts")
    assert worker.draft_worker.built == [
        ("attention", inside),
        ("graphs", inside),
        ("target [1, 2]", ()),
    ]
    # Nothing stays behind on the objects.
    assert list(vars(worker.draft_worker)) == ["built"]
    assert list(vars(worker.adaptive_controller)) == ["worker"]
