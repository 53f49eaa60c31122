"""What keeps data-parallel attention from being steered, beside what `test_resolution` asks."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import overrides

from engine_shim.sglang.api import attention_dp, versions
from engine_shim.sglang.api.settings import PluginSettings
from engine_shim.sglang.api.versions import TESTED


def reason(monkeypatch: pytest.MonkeyPatch, **configured: Any) -> str | None:
    view = {
        "attn_dp_size": 2,
        "ep_join_mode": None,
        "disaggregation_mode": "null",
        "enable_dp_attention_local_control_broadcast": False,
        "elastic_ep_backend": None,
    } | configured
    monkeypatch.setattr(overrides, "resolved_view", lambda _: SimpleNamespace(**view))
    args: Any = SimpleNamespace()
    return (
        attention_dp.attention_dp_check(args, PluginSettings(), has_dflash=False).obstacle or None
    )


def test_it_is_steered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(monkeypatch) is None


@pytest.mark.parametrize(
    "variable", ["SGLANG_SCHEDULER_SKIP_ALL_GATHER", "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"]
)
def test_variables_that_change_what_ranks_gather_or_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    refusal_reason = reason(monkeypatch)
    assert refusal_reason is not None
    assert variable in refusal_reason
    # They concern no other engine.
    assert reason(monkeypatch, attn_dp_size=1) is None


def test_elastic_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal_reason = reason(monkeypatch, elastic_ep_backend="mooncake")
    assert refusal_reason == "--elastic-ep-backend is untested with it"


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_dp, "_version_api", versions.module_for("0.5.21"))
    refusal_reason = reason(monkeypatch, enable_dp_attention=True)
    assert refusal_reason == "SGLang 0.5.23 is needed"


def test_heads_are_shared_by_the_ranks_of_one_batch() -> None:
    view = SimpleNamespace(tp_size=8, attn_dp_size=4)
    shared = {version: versions.module_for(version).attention_ranks(view) for version in TESTED}
    assert shared == {"0.5.21": 8, "0.5.22": 2, "0.5.23": 2}
