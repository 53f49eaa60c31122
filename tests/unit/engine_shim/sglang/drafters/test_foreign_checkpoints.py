"""Checkpoints of drafters that SGLang cannot run are known by their config.json."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.drafters.foreign_checkpoints import foreign_kind, raw_config


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["PEagleDraftModel"]}, "P-EAGLE drafter"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 7}, "P-EAGLE drafter"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True}, "P-EAGLE"),
        ({"architectures": ["Qwen3ForCausalLM"], "pard_token": 0}, "PARD drafter"),
        ({"spd_type": "pard"}, "PARD drafter"),
        ({"medusa_num_heads": 4}, "Medusa heads"),
        ({"model_type": "medusa"}, "Medusa heads"),
        ({"hydra_num_heads": 4}, "Hydra heads"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": 3}, "MLP speculator"),
        ({"model_type": "recurrent_drafter"}, "recurrent drafter"),
        ({"speculators_config": {}}, "Speculators"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "vLLM's EAGLE format"),
        ({"model_type": "p-eagle"}, "P-EAGLE drafter"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, "P-EAGLE drafter"),
        ({"architectures": ["PARDForCausalLM"]}, "PARD drafter"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 0}, "P-EAGLE drafter"),
        ({"parallel_drafting": None, "eagle_config": {"parallel_drafting": True}}, "P-EAGLE"),
        ({"model_type": "mlp_speculator"}, "MLP speculator"),
        ({"architectures": ["ReDrafterModel"]}, "recurrent drafter"),
        ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "LSTM speculator"),
        ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "n_predict": 3}, "LSTM"),
        ({"architectures": ["LookaheadForCausalLM"]}, "lookahead drafter"),
        ({"architectures": ["KangarooModel"]}, "Kangaroo adapter"),
        ({"model_type": "long_spec"}, "LongSpec drafter"),
        # One name instead of a list of them.
        ({"architectures": "MedusaModel"}, "Medusa heads"),
    ],
)
def test_a_foreign_kind_is_named_with_what_to_use_instead(
    config: dict[str, Any], kind: str
) -> None:
    description = foreign_kind(config)
    assert kind in description
    assert ": use " in description or ": if its weights" in description


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": None, "model_type": None},
        {"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": False},
        {"architectures": ["LlamaForCausalLMEagle"], "pard_token": None},
        {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"},
        # Words inside other words.
        {"architectures": ["LeopardForCausalLM"], "model_type": "leopard"},
        {"architectures": ["SHEPARDForCausalLM"]},
        {"architectures": ["DehydraForCausalLM", "PinkcloverForCausalLM"]},
        # What is off, and numbers of what is not there.
        {"parallel_drafting": 0, "eagle_config": {"parallel_drafting": False}},
        {"medusa_num_heads": 0, "hydra_num_heads": 0, "n_predict": 0, "speculator_width": 0},
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
    ],
)
def test_what_sglang_may_run_is_of_no_foreign_kind(config: dict[str, Any]) -> None:
    assert foreign_kind(config) == ""


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"7", b"null", b'{"a": ', b"\xff\xfe", b"[" * 9**5]
)
def test_a_file_that_is_no_json_object_is_an_error_that_names_it(
    tmp_path: Path, content: bytes
) -> None:
    tmp_path.joinpath("config.json").write_bytes(content)
    with pytest.raises(
        UnsupportedEngineError, match=r"config\.json (cannot be read|is not a JSON)"
    ):
        raw_config(str(tmp_path))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_an_error_that_names_it(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(
        UnsupportedEngineError, match=r"config\.json cannot be read: it is not a regular file"
    ):
        raw_config(str(tmp_path))


def test_a_folder_without_the_file_and_a_name_on_the_hub_say_nothing(tmp_path: Path) -> None:
    tmp_path.joinpath("file").touch()
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file", "org/model"):
        assert raw_config(str(path)) == {}
