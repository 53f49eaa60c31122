"""Run in SGLang's environment: asks which layers of targets DFlash checkpoints read.

    python -m tests.unit.engine_shim.sglang.drafters.layers_probe ASKED FOUND

ASKED: file with a JSON list of pairs, the folders of a target and of a checkpoint.  FOUND: file for
the JSON list of what was said of each: the target's layers in all, those that the plugin has it
emit, or an error, and those that SGLang has it emit, or an error.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state

from engine_shim.sglang.drafters.dflash_checkpoint import feature_layers, layer_count


def _emitted_by_sglang(draft: ModelConfig, target: ModelConfig) -> list[int]:
    """Returns what SGLang has a target emit where DFlash is the only drafter."""
    spec = SimpleNamespace(
        speculative_draft_model_path=draft.model_path, speculative_draft_model_revision=None
    )
    # The arguments of a whole engine would be read for these two.
    module: Any = spec_aux_hidden_state
    module.get_spec = lambda: spec
    module.ModelConfig = SimpleNamespace(from_server_args=lambda *_, **__: draft)
    aux_config = module.SpecAuxHiddenStateConfig()
    module._resolve_dflash_aux_hidden_state(
        config=aux_config,
        server_args=None,
        model_config=target,
        spec_algorithm=SimpleNamespace(is_dflash_family=lambda: True, is_dspark=lambda: False),
        is_draft_worker=False,
    )
    return list(aux_config.dflash_target_layer_ids)


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def _compare_layers(target: ModelConfig, draft: ModelConfig) -> dict[str, Any]:
    return {
        "count": layer_count(target),
        "plugin": _answer(lambda: list(feature_layers(draft, target))),
        "sglang": _answer(lambda: _emitted_by_sglang(draft, target)),
    }


def main() -> None:
    asked, output_path = map(Path, sys.argv[1:])
    pairs = [map(ModelConfig, pair) for pair in json.loads(asked.read_text())]
    output_path.write_text(json.dumps([_compare_layers(*pair) for pair in pairs]))


if __name__ == "__main__":
    main()
