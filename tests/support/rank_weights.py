"""What the two ranks of an engine with `sabotage:show_served_weights` serve, as a whole."""

from collections.abc import Mapping
from pathlib import Path

import torch

from tests.support.engine import install_plugin

# Rows of a rank's share (4 heads, 2 of keys and values) of what SGLang fuses.
_FUSED = {"qkv_proj": (64, 32, 32), "gate_up_proj": (192, 192)}


def weights_variables(served: Path) -> dict[str, str]:
    """Variables with which each rank leaves there what it serves."""
    target = "tests.system.engine.sabotage:show_served_weights"
    plugin = install_plugin(served / "plugin", target, name="zz_sabotage")
    return {"PYTHONPATH": str(plugin), "SERVED_WEIGHTS": str(served)}


def join_ranks(folder: Path, prefix: str = "rank") -> dict[str, torch.Tensor]:
    """What both ranks serve, or hold to be good."""
    parts = [torch.load(folder / f"{prefix}{rank}.pt") for rank in range(2)]
    tensors = {}
    for name, first in parts[0].items():
        second = parts[1][name]
        sizes = next((sizes for part, sizes in _FUSED.items() if part in name), None)
        if sizes is not None:
            pairs = zip(first.split(sizes), second.split(sizes), strict=True)
            tensors[name] = torch.cat([piece for pair in pairs for piece in pair])
        elif "o_proj" in name or "down_proj" in name:
            tensors[name] = torch.cat([first, second], dim=1)
        elif name == "lm_head.weight":
            tensors[name] = torch.cat([first, second])
        else:
            assert torch.equal(first, second), name
            tensors[name] = first
    return tensors


def check_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """All values, by name."""
    assert actual.keys() == expected.keys()
    for name, part in expected.items():
        assert torch.equal(actual[name], part.detach()), name


def is_same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same values."""
    return first.keys() == second.keys() and all(
        torch.equal(part, second[name]) for name, part in first.items()
    )


def check_served(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Both ranks together serve these."""
    check_same(join_ranks(folder), expected)


def load_trained(folder: Path) -> dict[str, torch.Tensor]:
    """What the trainer has made last."""
    tensors: dict[str, torch.Tensor] = torch.load(folder / "made0.pt")
    return tensors
