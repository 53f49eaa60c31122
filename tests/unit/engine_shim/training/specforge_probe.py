"""Run with SpecForge's package on the path: reads what was exported, trains nothing, exports."""

import json
import sys
from pathlib import Path

import torch
from specforge.algorithms.common.dflash_family_data import (
    normalize_offline_sample as normalize_dflash,
)
from specforge.algorithms.eagle3.data import (
    build_offline_normalizer,
    build_offline_reader,
)
from specforge.config.schema import load_config
from specforge.export.to_hf import export_to_hf
from specforge.export.to_sglang import export_to_sglang
from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.training.model_loading import warm_start_draft_model


def eagle3(exported: Path, out: Path) -> dict[str, object]:
    config = load_config(str(exported / "specforge.json"))
    length = config.data.max_length
    reader = build_offline_reader(
        config.data.hidden_states_path, run_id="r", ttt_length=7, max_len=length
    )
    reader.validate_files = True
    refs = reader.read()
    normalize = build_offline_normalizer(length)
    first = normalize(load_feature_file(refs[0].feature_store_uri.removeprefix("file://")))
    draft_config = AutoDraftModelConfig.from_file(config.model.draft_model_config)
    model = AutoDraftModel.from_config(draft_config, torch_dtype=torch.bfloat16)
    warm_start_draft_model(
        model,
        config.model.draft_checkpoint_path,
        draft_config=draft_config,
        strategy="eagle3",
        allow_missing_embedding=True,
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    _export(model, "eagle3", out)
    export_to_sglang(str(out), config.model.draft_model_config, str(out / "sglang"))
    return {
        "mode": config.mode,
        "samples": len(refs),
        "tokens": [ref.num_tokens for ref in refs],
        "shapes": {name: list(part.shape) for name, part in first.items()},
        "first": first["input_ids"][0].tolist(),
    }


def dflash(exported: Path, out: Path) -> dict[str, object]:
    config = load_config(str(exported / "specforge.json"))
    files = sorted(Path(config.data.hidden_states_path).rglob("*.ckpt"))
    found = normalize_dflash(torch.load(files[0]), config.data.max_length)
    config_file = config.model.draft_model_config
    draft_config = AutoDraftModelConfig.from_file(config_file)
    model = AutoDraftModel.from_config(draft_config, torch_dtype=torch.bfloat16)
    warm_start_draft_model(
        model,
        config.model.draft_checkpoint_path,
        draft_config=draft_config,
        strategy="dflash",
        allow_missing_embedding=True,
    )
    with torch.no_grad():
        model.fc.weight.mul_(2)
    _export(model, "dflash", out)
    export_to_hf(str(out), config_file, str(out / "hf"))
    return {
        "mode": config.mode,
        "samples": len(files),
        "shapes": {name: list(part.shape) for name, part in found.items()},
    }


def _export(model: torch.nn.Module, strategy: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    weights = {k: v for k, v in model.state_dict().items() if "embed" not in k}
    torch.save({"strategy": strategy, "draft_state_dict": weights}, out / "training_state.pt")


if __name__ == "__main__":
    kind = {"eagle3": eagle3, "dflash": dflash}[sys.argv[1]]
    print("RESULT " + json.dumps(kind(Path(sys.argv[2]), Path(sys.argv[3]))))
