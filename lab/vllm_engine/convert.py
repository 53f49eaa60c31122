"""Makes an EAGLE3 drafter for SGLang one that vLLM loads: `python -m lab.vllm_engine.convert`.

vLLM takes hidden states as a layer's input and SGLang as its output, so the numbers of the layers
are one higher; vLLM's first model runner reads them in `eagle_config` and the second one beside it;
and vLLM refuses the table of a draft vocabulary (`d2t`, `t2d`) where both
vocabularies have the same size.
"""

import json
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

_TABLES = frozenset({"d2t", "t2d"})
_LAYERS = "eagle_aux_hidden_state_layer_ids"


def convert_eagle3(source: Path, target: Path) -> None:
    """Writes the drafter of the folder source to the folder target."""
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    eagle = config["eagle_config"]
    config[_LAYERS] = eagle[_LAYERS] = [layer + 1 for layer in eagle[_LAYERS]]
    (target / "config.json").write_text(json.dumps(config, indent=2))
    with safe_open(source / "model.safetensors", "pt") as weights:
        names = [name for name in weights.keys() if name not in _TABLES]  # noqa: SIM118
        tensors = {name: weights.get_tensor(name) for name in names}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    convert_eagle3(*map(Path, sys.argv[1:3]))
