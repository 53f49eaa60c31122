"""Describes an engine before it starts: whether it would be steered, and what that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from engine_shim.common.checks import Check
from engine_shim.common.settings import ShimSettings

# Where the documents put the sidecar's socket.
SIDECAR: Final = "unix:/run/speculation/controller.sock"


class InputError(ValueError):
    """Options that say nothing about an engine; the message says why."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """Describes a drafter that would be steered.  gammas: its draft lengths, ascending."""

    name: str
    gammas: tuple[int, ...]
    model: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """Describes what the plugin takes of each device.

    values: the numbers by name, sizes in MiB unless the name says otherwise.  lines: the same for
    people.
    """

    values: Mapping[str, Any]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Describes an engine as its flags have it.

    facts: what was found and is no obstacle whatever it is.  variables: for the engine's
    environment, by name.  memory: None where the engine would not be steered.  left_out: names of
    flags of a running engine that were not looked at, because they may make SGLang load something.
    """

    engine: str
    version: str
    checks: tuple[Check, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    drafters: tuple[Drafter, ...] = ()
    memory: Memory | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def is_steered(self) -> bool:
        """Whether no check has found an obstacle."""
        return not any(check.obstacle for check in self.checks)

    @property
    def starts(self) -> bool:
        """Whether the engine starts, be it without a gain."""
        return all(check.starts for check in self.checks if check.obstacle)

    def document(self) -> dict[str, Any]:
        """Returns everything in plain values."""
        return {
            "api_version": "speculation.v1",
            "kind": "WouldSteer",
            "would_be_steered": self.is_steered,
            "engine": self.engine,
            "engine_version": self.version,
            "checks": [
                {
                    "topic": one.topic,
                    "found": one.found,
                    "obstacle": one.obstacle,
                    "starts": one.starts,
                    "advice": one.advice,
                }
                for one in self.checks
            ],
            "facts": dict(self.facts),
            "drafters": [asdict(drafter) for drafter in self.drafters],
            "memory": None if self.memory is None else dict(self.memory.values),
            "variables": dict(self.variables),
            "left_out": list(self.left_out),
        }


def variables_of(settings: ShimSettings, gammas: tuple[int, ...]) -> dict[str, str]:
    """Returns the SPECULATION_* variables that this verdict is true of.

    Those that are set, the two that an engine cannot do without among them.  gammas: draft lengths
    that the engine prepares.
    """
    found = {name: getattr(settings, name) for name in sorted(settings.model_fields_set)}
    found = {"sidecar": SIDECAR, "gammas": gammas} | {k: v for k, v in found.items() if v != ""}
    return {f"SPECULATION_{name.upper()}": _text(value) for name, value in found.items()}


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{limit}" for key, limit in value.items())
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)
