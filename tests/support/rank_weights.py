"""What the two ranks of an engine with `sabotage:show_served_weights` serve, as a whole."""

from collections.abc import Mapping
from pathlib import Path

import torch

from tests.support.engine import install_plugin

# Rows of a rank's share (4 heads, 2 of keys and values) of what SGLang fuses.
_FUSED = {"qkv_proj": (64, 32, 32), "gate_up_proj": (192, 192)}


def shown(served: Path) -> dict[str, str]:
    """Variables with which each rank leaves there what it serves."""
    target = "tests.system.engine.sabotage:show_served_weights"
    plugin = install_plugin(served / "plugin", target, name="zz_sabotage")
    return {"PYTHONPATH": str(plugin), "SERVED_WEIGHTS": str(served)}


def joined(folder: Path, what: str = "rank") -> dict[str, torch.Tensor]:
    """What both ranks serve, or hold to be good."""
    parts = [torch.load(folder / f"{what}{rank}.pt") for rank in range(2)]
    found = {}
    for name, first in parts[0].items():
        second = parts[1][name]
        sizes = next((sizes for part, sizes in _FUSED.items() if part in name), None)
        if sizes is not None:
            pairs = zip(first.split(sizes), second.split(sizes), strict=True)
            found[name] = torch.cat([one for pair in pairs for one in pair])
        elif "o_proj" in name or "down_proj" in name:
            found[name] = torch.cat([first, second], dim=1)
        elif name == "lm_head.weight":
            found[name] = torch.cat([first, second])
        else:
            assert torch.equal(first, second), name
            found[name] = first
    return found


def check_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """All values, by name."""
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert torch.equal(found[name], part.detach()), name


def is_same(found: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same values."""
    return found.keys() == other.keys() and all(
        torch.equal(part, other[name]) for name, part in found.items()
    )


def check_served(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Both ranks together serve these."""
    check_same(joined(folder), expected)


def made(folder: Path) -> dict[str, torch.Tensor]:
    """What the trainer has made last."""
    found: dict[str, torch.Tensor] = torch.load(folder / "made0.pt")
    return found
