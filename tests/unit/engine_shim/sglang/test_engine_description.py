"""How an engine introduces itself, from what SGLang resolved."""

import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.common.process import default_engine_id
from engine_shim.sglang.api import sglang_api, versions
from engine_shim.sglang.api.settings import PluginSettings
from engine_shim.sglang.engine_description import describe_engine, learner_index
from speculation.v1.engine_pb2 import DRAFTER_KIND_MTP


def scheduler(algorithm: str = "NEXTN") -> Any:
    runner = SimpleNamespace(
        device="cpu",
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        decode_attention_backend_str="triton",
        decode_cuda_graph_runner=SimpleNamespace(capture_bs=[8, 1, 4]),
    )
    return SimpleNamespace(
        server_args=SimpleNamespace(port=30000, speculative_algorithm=algorithm),
        tp_worker=SimpleNamespace(model_runner=runner),
        draft_worker=SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=runner)),
        max_running_requests=48,
        enable_overlap=True,
    )


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_path": "org/target",
        "revision": None,
        "quantization": "fp8",
        "tp_size": 1,
        "dp_size": 1,
        "attn_dp_size": 1,
        "speculative_draft_model_path": "org/draft",
        "speculative_draft_model_revision": "main",
    }
    monkeypatch.setattr(sglang_api, "config_leaf", values.__getitem__)
    return values


@pytest.mark.usefixtures("leaves")
def test_it_says_what_a_profile_belongs_to() -> None:
    spec = describe_engine(
        scheduler(), PluginSettings(engine_id="pod-7"), (0, 1, 3), can_sleep=True
    )
    assert (spec.engine_id, spec.max_batch_size) == ("pod-7", 48)
    fingerprint = spec.fingerprint
    assert fingerprint.target_model == "org/target"
    assert (fingerprint.engine, fingerprint.engine_version) == ("sglang", versions.sglang_version())
    assert (fingerprint.dtype, fingerprint.quantization) == ("bfloat16", "fp8")
    assert list(fingerprint.graph_batch_sizes) == [1, 4, 8]
    assert fingerprint.attention_backend == "triton"
    assert fingerprint.device not in ("", "cpu")
    drafter = spec.drafters[0]
    assert (drafter.name, drafter.kind, drafter.model) == ("nextn", DRAFTER_KIND_MTP, "org/draft")
    assert (list(drafter.gammas), drafter.revision) == ([0, 1, 3], "main")
    assert (spec.capabilities.can_sleep, spec.capabilities.overlap_steps) == (True, 1)


@pytest.mark.usefixtures("leaves")
def test_models_that_cannot_be_weighed_are_introduced_without_a_shape() -> None:
    """The runners here have no model to look into; the engine starts all the same."""
    spec = describe_engine(scheduler(), PluginSettings(), (0, 1), can_sleep=True)
    assert not spec.HasField("shape")
    assert not spec.drafters[0].HasField("shape")


def test_a_local_draft_has_no_revision(leaves: dict[str, Any], tmp_path: Path) -> None:
    leaves["speculative_draft_model_path"] = str(tmp_path)
    spec = describe_engine(scheduler("EAGLE3"), PluginSettings(), (0, 1), can_sleep=False)
    assert (spec.drafters[0].name, spec.drafters[0].revision) == ("eagle3", "")


def test_the_default_engine_id_is_allowed_by_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "höst/ with spaces" * 20)
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", default_engine_id(30000))


@pytest.mark.parametrize(
    ("name", "has_second", "place"),
    [("", True, 0), ("eagle3", True, 0), ("dflash", True, 1), ("eagle3", False, 0)],
)
def test_the_learner_is_found_by_its_name(name: str, has_second: bool, place: int) -> None:
    assert learner_index(scheduler("EAGLE3"), name, has_second=has_second) == place


@pytest.mark.parametrize(
    ("name", "has_second", "known"),
    [
        ("dflash", False, "there is eagle3$"),
        ("ngram", True, "there is eagle3 and dflash$"),
        ("EAGLE3", True, "there is eagle3 and dflash$"),
    ],
)
def test_a_learner_that_the_engine_has_not_is_refused(
    name: str, has_second: bool, known: str
) -> None:
    with pytest.raises(UnsupportedEngineError, match=f"SPECULATION_LEARNER: '{name}'.*{known}"):
        learner_index(scheduler("EAGLE3"), name, has_second=has_second)
