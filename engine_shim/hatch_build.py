"""Lays out the shim's wheel; in an editable install everything stays where it is."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShimLayout(BuildHookInterface):  # type: ignore[misc]
    """Puts this folder below `engine_shim`, with the generated contract beside it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the shim's packages.

        version: "standard" for a wheel, "editable" for `pip install -e`.
        """
        if version == "standard":
            parts = (
                "__init__.py", "py.typed", "common", "link", "preflight", "sglang", "vllm",
            )  # fmt: skip
            build_data["force_include"] |= {part: f"engine_shim/{part}" for part in parts} | {
                "../LICENSE": "engine_shim/LICENSE",
                # Both distributions contain the contract; its versions are compatible.
                "../proto/speculation": "speculation",
            }
