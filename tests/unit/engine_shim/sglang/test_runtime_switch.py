"""The quiet switch leaves the worker as SGLang's own would, and leaves nothing else behind."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context

from engine_shim.sglang.adaptive_policy import RuntimeSwitch
from engine_shim.sglang.api import sglang_api
from engine_shim.sglang.api.versions import sglang_version
from tests.support.installed_wheel import Wheel

GAMMAS = (0, 1, 3, 7)


class Draft(SimpleNamespace):
    """What both switches touch of an `EagleDraftWorker`; counts what it has to build."""

    builds = 0

    def _rebuild_topk1_chain_buffers(self) -> None:
        self.builds += 1
        steps = self.speculative_num_steps
        self._topk1_parents_prealloc = torch.arange(-1, max(steps, 1) - 1).repeat(4, 1)
        self._topk1_score_indices_prealloc = torch.arange(steps).repeat(4, 1)


def worker() -> Any:
    draft = Draft(
        speculative_num_steps=3,
        speculative_num_draft_tokens=4,
        draft_runner=SimpleNamespace(attn_backend="initial"),
    )
    draft._rebuild_topk1_chain_buffers()
    return SimpleNamespace(
        speculative_num_steps=3,
        speculative_num_draft_tokens=4,
        draft_worker=draft,
        _draft_worker=draft,
        _target_worker=SimpleNamespace(model_runner=SimpleNamespace()),
    )


def state(gamma: int) -> Any:
    names = (
        "draft_attn_backend",
        "cuda_graph_runner",
        "target_attn_backend",
        "target_graph_runner",
        "cuda_graph_runner_for_draft_extend",
    )
    return SimpleNamespace(
        speculative_num_steps=gamma,
        speculative_num_draft_tokens=gamma + 1,
        draft_extend_attn_backend=f"extend {gamma}" if gamma else None,
        **{name: f"{name} {gamma}" for name in names},
    )


def sglangs_own() -> Any:
    """SGLang's function, compiled from the wheel's text without importing its worker."""
    source = ast.unparse(Wheel(sglang_version()).definition(sglang_api.APPLY_RUNTIME_STATE))
    logged: list[str] = []
    names: dict[str, Any] = {
        "SpecRuntimeState": object,
        "get_context": runtime_context.get_context,
        "log_info_on_rank0": lambda _, message: logged.append(message),
        "logger": None,
    }
    exec(source, names)
    return names["apply_runtime_state"]


def everything(subject: Any) -> dict[str, Any]:
    """All attributes, tensors as lists, nested objects as their attributes."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return everything(value) if isinstance(value, SimpleNamespace) else value

    return {name: plain(value) for name, value in vars(subject).items() if name != "builds"}


class Context:
    """SGLang's runtime context as far as a switch sees it, over one of its real config bags."""

    def __init__(self) -> None:
        self.spec = runtime_context._ConfigBag("spec")
        self._overrides_log: list[tuple[str, dict[str, int]]] = []
        self.override("startup", speculative_num_steps=3, speculative_num_draft_tokens=4)

    def override(self, source: str, **values: int) -> None:
        for name, value in values.items():
            self.spec._set(name, value)
        self._overrides_log.append((source, dict(values)))

    @property
    def published(self) -> tuple[int, int]:
        return self.spec.speculative_num_steps, self.spec.speculative_num_draft_tokens


@pytest.fixture(autouse=True)
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    fake = Context()
    monkeypatch.setattr(runtime_context, "get_context", lambda: fake)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: fake.spec)
    return fake


def test_the_worker_is_as_after_sglangs_own_switch(context: Context) -> None:
    ours, theirs = worker(), worker()
    switch, own = RuntimeSwitch(), sglangs_own()
    switch.prepare(ours, GAMMAS)
    for gamma in (1, 7, 0, 3, 3, 0, 7, 1):
        switch.apply_runtime_state(ours, state(gamma))
        quiet = context.published
        own(theirs, state(gamma))
        assert everything(ours) == everything(theirs)
        assert quiet == context.published == (gamma, gamma + 1)


def test_preparing_leaves_the_worker_as_it_was() -> None:
    graph_states, untouched = worker(), worker()
    RuntimeSwitch().prepare(graph_states, GAMMAS)
    assert everything(graph_states) == everything(untouched)


def test_nothing_is_built_and_no_log_grows(context: Context) -> None:
    subject, switch = worker(), RuntimeSwitch()
    switch.prepare(subject, GAMMAS)
    switch.apply_runtime_state(subject, state(1))
    builds, entries = subject.draft_worker.builds, len(context._overrides_log)
    for step in range(100):
        switch.apply_runtime_state(subject, state(GAMMAS[step % 4]))
    assert subject.draft_worker.builds == builds
    assert len(context._overrides_log) == entries
    # What SGLang shows of its configuration is what runs.
    assert context._overrides_log[-1] == (
        sglang_api.SWITCH_SOURCE,
        {"speculative_num_steps": 7, "speculative_num_draft_tokens": 8},
    )


def test_a_state_that_was_not_prepared_is_built() -> None:
    subject, switch = worker(), RuntimeSwitch()
    switch.apply_runtime_state(subject, state(2))
    assert subject.draft_worker._topk1_score_indices_prealloc.shape == (4, 2)
