"""Which batch sizes a limited draft length is captured for, by SGLang's own choice of sizes."""

import ast
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import Backend, PhaseConfig

from engine_shim.sglang.api import sglang_api
from engine_shim.sglang.api.versions import TESTED
from engine_shim.sglang.graph_states import GraphStates
from tests.support.installed_wheel import Wheel

RUNNERS = "sglang.srt.model_executor.runner"
CHOICE = f"{RUNNERS}.base_cuda_graph_runner.get_batch_sizes_to_capture"
SPECULATIVE = "sglang.srt.speculative"
CAPTURES = (
    f"{RUNNERS}.decode_cuda_graph_runner.DecodeCudaGraphRunner.__init__",
    f"{SPECULATIVE}.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.__init__",
    f"{SPECULATIVE}.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.__init__",
)
SIZES = [1, 2, 4, 8, 12, 16, 24, 32]


class CaptureParts:
    """The parts of an engine that a capture reads, with SGLang's real choice of sizes."""

    def __init__(self, version: str, monkeypatch: pytest.MonkeyPatch, requests: int = 64) -> None:
        from sglang.srt import runtime_context

        self.decode = PhaseConfig(backend=Backend.FULL, max_bs=SIZES[-1], bs=list(SIZES))
        graph = SimpleNamespace(
            cuda_graph_config=SimpleNamespace(decode=self.decode),
            cuda_graph_bs_decode=None,
            torch_compile_max_bs=0,
        )
        overlap = SimpleNamespace(enable_two_batch_overlap=False)
        bag = SimpleNamespace(graph=graph, overlap=overlap)
        monkeypatch.setattr(runtime_context, "get_exec", lambda: bag)
        self._choose = choice_of_sizes(version, bag)
        pool = SimpleNamespace(size=requests)
        self._runner = SimpleNamespace(req_to_token_pool=pool, server_args=None)
        own = SimpleNamespace(capture_bs=self._choose(self._runner)[0])
        self._runner.decode_cuda_graph_runner = own
        self.target_worker = SimpleNamespace(model_runner=self._runner)
        self.fails = False

    def build_part(self, _: Any, **steps: Any) -> Any:
        """Stands for the build, which captures three sets of graphs."""
        if self.fails:
            raise RuntimeError("out of memory")
        runner = None
        if self.decode.backend != Backend.DISABLED:
            runner = SimpleNamespace(capture_bs=self._choose(self._runner)[0])
        return SimpleNamespace(
            target_graph_runner=runner,
            cuda_graph_runner=runner if steps["speculative_num_steps"] > 1 else None,
            cuda_graph_runner_for_draft_extend=runner,
        )


def choice_of_sizes(version: str, bag: Any) -> Callable[[Any], tuple[list[int], list[int]]]:
    """SGLang's function, compiled from a version's source."""
    definition = Wheel(version).definition(CHOICE)
    assert isinstance(definition, ast.FunctionDef)
    definition.returns = None
    for argument in (*definition.args.args, *definition.args.kwonlyargs):
        argument.annotation = None
    capture = SimpleNamespace(enable_torch_compile=False)
    names: dict[str, Any] = {
        "get_exec": lambda: bag,
        "get_flags": lambda: SimpleNamespace(capture=capture),
        "get_cuda_graph_batch_size_alignment": lambda **_: 1,
        "get_cuda_graph_max_batch_size": lambda size: size,
        "ceil_align": lambda size, unit: math.ceil(size / unit) * unit,
        "DllmConfig": SimpleNamespace(from_server_args=lambda _: None),
    }
    exec(compile(ast.Module([definition], []), CHOICE, "exec"), names)
    choose: Callable[[Any], tuple[list[int], list[int]]] = names["get_batch_sizes_to_capture"]
    return choose


def build(states: GraphStates, engine: CaptureParts, gamma: int) -> Any:
    return states.around_build(engine.build_part, engine, gamma, gamma + 1)


@pytest.mark.parametrize("version", TESTED)
@pytest.mark.parametrize(
    ("limit", "captured"), [(8, [1, 2, 4, 8]), (10, [1, 2, 4, 8]), (1, [1]), (64, SIZES)]
)
def test_a_limited_draft_length_is_captured_for_small_batches_only(
    monkeypatch: pytest.MonkeyPatch, version: str, limit: int, captured: list[int]
) -> None:
    engine, states = CaptureParts(version, monkeypatch), GraphStates({7: limit})
    state = build(states, engine, 7)
    for runner in (state.target_graph_runner, state.cuda_graph_runner):
        assert runner.capture_bs == captured
    assert build(states, engine, 5).target_graph_runner.capture_bs == SIZES
    limits = {} if captured == SIZES else {7: captured[-1]}
    assert states.batch_limits == limits
    assert states.status()["7"]["largest_batch"] == limits.get(7)


@pytest.mark.parametrize("version", TESTED)
def test_a_size_that_sglang_adds_for_the_most_requests_is_kept(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    engine, states = CaptureParts(version, monkeypatch, requests=20), GraphStates({7: 18, 5: 20})
    assert build(states, engine, 7).target_graph_runner.capture_bs == [1, 2, 4, 8, 12, 16]
    assert build(states, engine, 5).target_graph_runner.capture_bs == [1, 2, 4, 8, 12, 16, 20]
    assert states.batch_limits == {7: 16}


@pytest.mark.parametrize("version", TESTED)
def test_a_limit_below_every_size_captures_nothing(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    engine, states = CaptureParts(version, monkeypatch), GraphStates({7: 0})
    assert build(states, engine, 7).target_graph_runner is None
    assert states.batch_limits == {7: 0}


@pytest.mark.parametrize("limit", [0, 8])
@pytest.mark.parametrize("fails", [False, True])
def test_the_configuration_is_afterwards_as_it_was(
    monkeypatch: pytest.MonkeyPatch, limit: int, *, fails: bool
) -> None:
    engine, states = CaptureParts(TESTED[-1], monkeypatch), GraphStates({7: limit})
    engine.fails, sizes = fails, engine.decode.bs
    if fails:
        with pytest.raises(RuntimeError, match="out of memory") as raised:
            build(states, engine, 7)
        assert "while draft length 7 was prepared" in raised.value.__notes__[0]
    else:
        build(states, engine, 7)
    assert engine.decode == PhaseConfig(backend=Backend.FULL, max_bs=SIZES[-1], bs=SIZES)
    assert engine.decode.bs is sizes


def test_without_graphs_the_limits_are_those_that_were_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, states = CaptureParts(TESTED[-1], monkeypatch), GraphStates({7: 8})
    engine.decode.backend = Backend.DISABLED
    engine.target_worker.model_runner.decode_cuda_graph_runner = None
    build(states, engine, 7)
    assert states.batch_limits == {7: 8}
    assert states.status()["7"]["largest_batch"] is None


@pytest.mark.parametrize("version", TESTED)
@pytest.mark.parametrize("capture", CAPTURES)
def test_every_set_of_graphs_asks_the_one_function_for_its_sizes(
    version: str, capture: str
) -> None:
    assert "get_batch_sizes_to_capture" in Wheel(version).calls(capture)


@pytest.mark.parametrize("version", TESTED)
def test_a_draft_length_is_built_without_graphs_where_they_are_disabled(version: str) -> None:
    assert "check_cuda_graph_backend" in Wheel(version).calls(sglang_api.BUILD_STATE)
    draft = f"{SPECULATIVE}.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs"
    assert "check_cuda_graph_backend" in Wheel(version).calls(draft)
