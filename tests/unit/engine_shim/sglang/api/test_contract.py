"""What the plugin relies on in SGLang, held against the source of each version it is tested with.

A failure here means that SGLang changed under the plugin: read the change, adapt `surface` (and
what uses it) or a module of `versions`, then the tables of `contracts`.
"""

import ast
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import pytest

from engine_shim.sglang.api import sglang_api
from engine_shim.sglang.api.versions import TESTED, module_for, sglang_version
from tests.support.installed_wheel import Wheel
from tests.unit.engine_shim.sglang.api.contracts import (
    ATTRIBUTES,
    DFLASH,
    EAGLE,
    HOOKS,
    INTERNAL_STATE,
    OLDER_ATTRIBUTES,
    OLDER_CODE,
    OLDER_PARAMETERS,
    RESULTS,
    SAME_CODE,
    USED,
)

Expected = TypeVar("Expected")


@cache
def wheel(version: str) -> Wheel:
    return Wheel(version)


def expectations(
    table: Mapping[str, Expected], older: Mapping[str, Mapping[str, Expected | None]]
) -> list[tuple[str, str, Expected]]:
    """(version, target, expected), but for what a version is known not to have."""
    return [
        (version, target, expected)
        for version in TESTED
        for target, expected in sorted({**table, **older.get(version, {})}.items())
        if expected is not None
    ]


def test_one_of_them_is_installed() -> None:
    assert sglang_version() in TESTED


def test_every_version_has_the_same_names() -> None:
    names = [
        {name for name in vars(module_for(version)) if not name.startswith("_")}
        - {"Iterator", "contextmanager", "newer", "nullcontext"}
        for version in TESTED
    ]
    assert all(version_names == names[0] for version_names in names)


@pytest.mark.parametrize(
    ("version", "target", "expected"), expectations(HOOKS | USED, OLDER_PARAMETERS)
)
def test_a_function_takes_what_the_plugin_gives_it(
    version: str, target: str, expected: str
) -> None:
    assert wheel(version).parameters(target) == expected


@pytest.mark.parametrize("version", TESTED)
def test_the_internal_state_is_where_the_plugin_looks(version: str) -> None:
    target, takes = INTERNAL_STATE[version]
    assert target == module_for(version).INTERNAL_STATE
    assert wheel(version).parameters(target) == takes


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    expectations({target: digest for target, (digest, _) in SAME_CODE.items()}, OLDER_CODE),
)
def test_code_that_the_plugin_stands_in_for_is_unchanged(
    version: str, target: str, expected: str
) -> None:
    _, why_it_matters = SAME_CODE[target]
    assert wheel(version).digest(target) == expected, why_it_matters


@pytest.mark.parametrize(
    ("version", "target", "expected"), expectations(ATTRIBUTES, OLDER_ATTRIBUTES)
)
def test_an_object_has_what_the_plugin_reads_or_writes(
    version: str, target: str, expected: set[str]
) -> None:
    assert expected <= wheel(version).fields(target)


@pytest.mark.parametrize("version", TESTED)
def test_a_decode_step_goes_through_every_hook(version: str) -> None:
    assert {"activate_step_by_batch", "draft", "verify", "_draft_extend_for_decode"} <= wheel(
        version
    ).calls(sglang_api.FORWARD)
    assert "_resolve_spec_v2_tokens" in wheel(version).calls(
        f"{RESULTS}.SchedulerBatchResultProcessor._normalize_decode_outputs"
    )
    assert {"_normalize_decode_outputs", "update_finish_state"} <= wheel(version).calls(
        sglang_api.PROCESS_DECODE_RESULT
    )
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    assert "init_model_worker" in wheel(version).calls(f"{scheduler}.__init__")
    assert "forward_batch_generation" in wheel(version).calls(f"{scheduler}.run_batch")
    assert "AdaptiveSpeculativeParams" in wheel(version).calls(f"{EAGLE}.EAGLEWorkerV2.__init__")


@pytest.mark.parametrize("version", TESTED)
def test_a_drafters_graph_is_executed_beside_its_runner(version: str) -> None:
    """So a pass that goes through `ModelRunner.forward` has run without one."""
    draft = f"{EAGLE}.EagleDraftWorker"
    for part in ("draft", "_draft_extend_for_decode"):
        assert "execute" in wheel(version).calls(f"{draft}.{part}")
    for part in ("draft_forward", "_draft_extend_for_decode"):
        assert "forward" in wheel(version).calls(f"{draft}.{part}")
    assert "forward" in wheel(version).calls(f"{DFLASH}.forward_batch_generation")


@pytest.mark.parametrize("version", TESTED)
def test_every_reader_of_the_candidate_steps_goes_through_the_one_function(version: str) -> None:
    algorithm = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm"
    readers = (
        "sglang.srt.model_executor.model_runner.ModelRunner.max_decode_logits_rows",
        f"{algorithm}.resolve_max_speculative_num_draft_tokens",
        "sglang.srt.arg_groups.speculative_hook._init_adaptive_speculative_params",
    )
    for reader in readers:
        assert "resolve_candidate_steps_from_config" in wheel(version).calls(reader)


@pytest.mark.parametrize("version", TESTED)
def test_plugins_are_loaded_before_configuration_and_before_the_scheduler(version: str) -> None:
    scheduler = wheel(version).definition("sglang.srt.managers.scheduler.run_scheduler_process")
    assert ast.unparse(scheduler.body[0]) == "load_plugins()"
    assert "load_plugins" in wheel(version).calls("sglang.srt.entrypoints.engine.Engine.__init__")
    assert "run_hook" in wheel(version).calls(
        "sglang.srt.arg_groups.pipeline.run_resolution_pipeline"
    )
