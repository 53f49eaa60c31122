"""An EAGLE3 drafter for SGLang, converted for vLLM, names its layers where both runners look."""

import json
from types import SimpleNamespace

from engine_shim.vllm.draft_lengths import unread_layers_warning
from lab.vllm_engine.convert import convert_eagle3
from tests.support.engine import DRAFT

LAYERS = "eagle_aux_hidden_state_layer_ids"


def test_both_model_runners_find_the_layers(tmp_path):
    convert_eagle3(DRAFT, tmp_path)
    before = json.loads((DRAFT / "config.json").read_text())["eagle_config"][LAYERS]
    after = json.loads((tmp_path / "config.json").read_text())
    assert after["eagle_config"][LAYERS] == after[LAYERS] == [layer + 1 for layer in before]
    drafter = SimpleNamespace(hf_config=SimpleNamespace(**after))
    config = SimpleNamespace(
        use_v2_model_runner=True,
        speculative_config=SimpleNamespace(method="eagle3", draft_model_config=drafter),
    )
    assert unread_layers_warning(config) == ""
    del drafter.hf_config.eagle_aux_hidden_state_layer_ids
    assert LAYERS in unread_layers_warning(config)
