"""Compares the sidecar's own choice of updates with fixed strides, on streams of the small models.

One engine a choice, each with its sidecar and trainer, all with the same cost profile; every batch
of requests goes to all of them, one after the other, so that what the machine does over minutes
hits all alike.  The draft length, gamma = 0 included, is the sidecar's in all of them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from lab.cpu_engine.engine_command import MODELS
from lab.harness.spread import Spread
from lab.learning.engines_at_work import Lab, LabSetting, running

OWN: Final = "chosen"
_CHOICES: Final = ("off", "online:20", "online:5", OWN)
_PROFILE_SECONDS: Final = 40.0
_QUICK_PROFILE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Stream:
    """`waves` batches of `count` requests of one domain, with that drafter to begin with."""

    draft: str
    domain: str
    count: int
    waves: int


# Something to learn, nothing to learn, and as many requests as the engine runs at once.
STREAMS: Final = {
    "learnable": _Stream("draft-code", "csv", 4, 14),
    "aligned": _Stream("draft-mixed", "json", 4, 10),
    "large batch": _Stream("draft-mixed", "prose", 16, 5),
}


def bars(setting: LabSetting) -> dict[str, Any]:
    """Measures tokens per second over a whole stream, by choice; ratios of the same seed.

    later: over the second half of the stream, when the choice has had time to find out.
    """
    found: dict[str, Any] = {}
    for name in ("aligned",) if setting.quick else STREAMS:
        # By seed: seconds of each wave, by choice.
        played = [_played(setting, name, seed) for seed in range(setting.seeds)]
        tokens = STREAMS[name].count * _tokens(setting)
        speeds = {
            choice: tuple(tokens * len(waves[choice]) / sum(waves[choice]) for waves in played)
            for choice in _CHOICES
        }
        best = max(_CHOICES[:-1], key=lambda choice: sum(speeds[choice]))
        found[name] = {
            "tokens/s": {choice: Spread(values).as_json() for choice, values in speeds.items()},
            "best fixed": best,
        }
        for title, other in (("best fixed", best), ("off", "off")):
            ratio = f"chosen over {title}"
            found[name][ratio] = _ratio(played, other, 0)
            found[name][f"{ratio}, later"] = _ratio(played, other, len(played[0][OWN]) // 2)
    return found


def _ratio(played: list[dict[str, list[float]]], other: str, since: int) -> dict[str, Any]:
    """Computes the ratio of the sidecar's choice to another, from wave `since` on."""
    pairs = (sum(waves[other][since:]) / sum(waves[OWN][since:]) for waves in played)
    return Spread(tuple(pairs)).as_json()


def _played(setting: LabSetting, name: str, seed: int) -> dict[str, list[float]]:
    """Plays a stream; returns the seconds of each wave, by choice."""
    stream = STREAMS[name]
    tokens = _tokens(setting)
    seconds: dict[str, list[float]] = {choice: [] for choice in _CHOICES}
    with ExitStack() as stack:
        labs = {
            choice: stack.enter_context(_engine(setting, name, choice, seed)) for choice in _CHOICES
        }
        for choice in _CHOICES[:-1]:
            stack.enter_context(labs[choice].regime(choice))
        for wave in range(2 if setting.quick else stream.waves):
            # In turn, so that no choice is always the first.
            turn = wave % len(_CHOICES)
            for choice in (*_CHOICES[turn:], *_CHOICES[:turn]):
                played = labs[choice].generate(
                    stream.domain, stream.count, tokens, 1000 * seed + wave
                )
                seconds[choice].append(stream.count * tokens / played.tokens_per_second)
    return seconds


def _tokens(setting: LabSetting) -> int:
    """Returns the number of new tokens of each request."""
    return 60 if setting.quick else 200


@contextmanager
def _engine(setting: LabSetting, name: str, choice: str, seed: int) -> Iterator[Lab]:
    """Starts an engine; the costs of a stream's first one are measured, the others share them."""
    stream = STREAMS[name]
    with running(
        setting,
        f"{name}-{choice}-{seed}".replace(" ", "-").replace(":", "-"),
        MODELS / stream.draft,
        (0, 1, 3),
        {"SPECULATION_ONLINE_UPDATES": "1"},
        {"CONTROLLER_PROFILE_DIRECTORY": str(setting.scratch / f"profiles of {name}")},
        batch_max=stream.count,
    ) as lab:
        if not lab.sidecar.status().profile_id:
            lab.profile(_QUICK_PROFILE_SECONDS if setting.quick else _PROFILE_SECONDS)
        yield lab
