"""Which passes of a decode step are reported to have run without a graph."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.sglang.eager_passes import NO_PASSES, EagerPasses, Passes, watch_drafters

DECODE, DRAFT_EXTEND, EXTEND, VERIFY = "decode", "draft_extend_v2", "extend", "target_verify"
ALL = Passes.VERIFICATION | Passes.DRAFT | Passes.DRAFT_EXTEND


class Runner:
    """A `ModelRunner` that says whether its passes ran in a graph."""

    def __init__(self, *, in_graph: bool = False, capture_bs: tuple[int, ...] = ()) -> None:
        self.in_graph = in_graph
        self.decode_cuda_graph_runner = SimpleNamespace(capture_bs=list(capture_bs))

    def forward(self, forward_batch: Any, *, reinit: bool = False) -> Any:
        return SimpleNamespace(can_run_graph=self.in_graph, reinit=reinit)


def state(gamma: int, captured: Passes) -> Any:
    """What SGLang has prepared of a draft length."""
    return SimpleNamespace(
        speculative_num_steps=gamma,
        target_graph_runner=object() if Passes.VERIFICATION in captured else None,
        cuda_graph_runner=object() if Passes.DRAFT in captured and gamma > 1 else None,
        cuda_graph_runner_for_draft_extend=object() if Passes.DRAFT_EXTEND in captured else None,
    )


def engine(
    captured: Passes = ALL,
    block: Any = None,
    *,
    alone: bool = False,
    gammas: tuple[int, ...] = (0, 3),
) -> tuple[EagerPasses, Runner]:
    runner = block.runner if alone else Runner()
    worker = SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=runner))
    return watch_drafters(worker, [state(gamma, captured) for gamma in gammas], block), runner


def block(
    *, in_graph: bool = True, capture_bs: tuple[int, ...] = (1, 2), failure_reason: str = ""
) -> Any:
    return SimpleNamespace(
        runner=Runner(in_graph=in_graph, capture_bs=capture_bs), failure_reason=failure_reason
    )


def passes(mode: str) -> Any:
    """A batch in a forward mode of SGLang's."""
    asked = {f"is_{name}": lambda name=name: mode == name for name in (DECODE, DRAFT_EXTEND)}
    return SimpleNamespace(forward_mode=SimpleNamespace(**asked))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (DECODE, Passes.DRAFT),
        (DRAFT_EXTEND, Passes.DRAFT_EXTEND),
        # A prefill and catching up.
        (EXTEND, NO_PASSES),
    ],
)
def test_a_pass_of_the_chain_drafter_is_known_by_its_mode(mode: str, expected: Passes) -> None:
    eager, runner = engine()
    output = runner.forward(passes(mode), reinit=True)
    assert output.reinit
    assert eager.step_passes == expected


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_block_is_eager_when_its_runner_says_so(*, in_graph: bool, alone: bool) -> None:
    second = block(in_graph=in_graph)
    eager, _ = engine(block=second, alone=alone)
    second.runner.forward(passes(VERIFY))
    assert eager.step_passes == (NO_PASSES if in_graph else Passes.BLOCK)


def test_steps_are_counted_by_the_passes_that_have_graphs() -> None:
    eager, _ = engine(Passes.VERIFICATION | Passes.DRAFT)
    assert eager.count(Passes.DRAFT)
    assert eager.count(Passes.DRAFT | Passes.VERIFICATION | Passes.DRAFT_EXTEND)
    assert not eager.count(Passes.DRAFT_EXTEND)
    assert not eager.count(NO_PASSES)
    assert eager.status() == {
        "steps": {"verification": 1, "draft": 2},
        "without_graphs": ["draft_extend"],
    }


@pytest.mark.parametrize(
    ("captured", "second", "missing"),
    [
        (ALL, None, []),
        (ALL, block(), []),
        (ALL, block(capture_bs=()), ["block"]),
        (ALL, block(capture_bs=(), failure_reason="it cannot draft"), []),
        (Passes.VERIFICATION, None, ["draft", "draft_extend"]),
        # The engine was started without graphs.
        (NO_PASSES, None, []),
        (NO_PASSES, block(capture_bs=()), []),
    ],
)
def test_passes_that_never_have_a_graph_are_said_at_the_start(
    captured: Passes, second: Any, missing: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    eager, _ = engine(captured, second)
    assert eager.status()["without_graphs"] == missing
    with caplog.at_level(logging.WARNING):
        eager.log()
    assert [", ".join(missing) in record.getMessage() for record in caplog.records] == (
        [True] if missing else []
    )


@pytest.mark.parametrize("gammas", [(0, 1), (0,)])
def test_no_graph_of_a_draft_is_missed_where_no_draft_runs_a_pass(gammas: tuple[int, ...]) -> None:
    eager, _ = engine(ALL, gammas=gammas)
    assert eager.status()["without_graphs"] == []


def test_a_block_alone_has_no_chain() -> None:
    eager, _ = engine(Passes.VERIFICATION, block(), alone=True)
    assert eager.captured == Passes.VERIFICATION | Passes.BLOCK
    assert eager.missing == NO_PASSES
