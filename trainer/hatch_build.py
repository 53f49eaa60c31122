"""Lays out the trainer's wheel; in an editable install everything stays where it is."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TrainerLayout(BuildHookInterface):  # type: ignore[misc]
    """Puts the modules of this folder below `trainer`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the trainer's modules.

        version: "standard" for a wheel, "editable" for `pip install -e`.
        """
        if version == "standard":
            modules = {path.name for path in Path(self.root).glob("*.py")} - {"hatch_build.py"}
            build_data["force_include"] |= {
                part: f"trainer/{part}" for part in ("py.typed", *sorted(modules))
            } | {"../LICENSE": "trainer/LICENSE"}
