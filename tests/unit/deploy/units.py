"""The systemd units, read line by line."""

import re
from collections import defaultdict
from pathlib import Path

from tests.unit.deploy.manifests import ROOT

SYSTEMD = ROOT / "deploy" / "systemd"
SIDECAR = SYSTEMD / "speculation-controller.service"
ENGINE = SYSTEMD / "sglang.service"

Unit = dict[tuple[str, str], list[str]]


def read_unit(path: Path) -> Unit:
    """By (section, key); a key may stand several times."""
    text = re.sub(r"\\\n\s*", "", path.read_text())
    unit: Unit = defaultdict(list)
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            unit[section, key].append(value)
    return unit


def environment(unit: Unit) -> dict[str, str]:
    pairs = (item.partition("=") for item in unit["Service", "Environment"])
    return {name: value for name, _, value in pairs}
