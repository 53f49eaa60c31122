"""The sidecar's own choice of updates against fixed strides, on streams of the small models.

Every choice begins with the same engine and drafter and gets the same requests, one batch after the
other; the draft length, gamma = 0 included, is the sidecar's in all of them.
"""

from typing import Any, Final

from engine_shim.cpu.lab.place import MODELS, Lab, Setting, running
from engine_shim.stage.spread import Spread

OWN: Final = "chosen"
_CHOICES = ("off", "online:20", "online:5", OWN)
# (drafter, domain, requests at once): something to learn, nothing to learn, a large batch.
STREAMS: Final = {
    "learnable": ("draft-code", "csv", 4),
    "aligned": ("draft-mixed", "json", 4),
    "large batch": ("draft-mixed", "prose", 14),
}


def bars(setting: Setting) -> dict[str, Any]:
    """Tokens per second over a whole stream, by choice; ratios of the same seed."""
    found: dict[str, Any] = {}
    for name in ("aligned",) if setting.quick else STREAMS:
        speeds: dict[str, list[float]] = {choice: [] for choice in _CHOICES}
        for seed in range(setting.seeds):
            # In turn, so that a slow quarter of an hour hits all of them.
            for choice in _CHOICES if seed % 2 == 0 else _CHOICES[::-1]:
                speeds[choice].append(_played(setting, name, choice, seed))
        best = max(_CHOICES[:-1], key=lambda choice: sum(speeds[choice]))
        found[name] = {
            "tokens/s": {
                choice: Spread(tuple(values)).as_json() for choice, values in speeds.items()
            },
            "best fixed": best,
            "chosen over best fixed": _ratio(speeds[OWN], speeds[best]),
            "chosen over off": _ratio(speeds[OWN], speeds["off"]),
        }
    return found


def _played(setting: Setting, name: str, choice: str, seed: int) -> float:
    draft, domain, count = STREAMS[name]
    waves, tokens = (2, 60) if setting.quick else (10, 200)
    place = f"{name}-{choice}-{seed}".replace(" ", "-").replace(":", "-")
    variables = {"SPECULATION_ONLINE_UPDATES": "1"}
    with running(setting, place, MODELS / draft, (0, 1, 3), variables) as lab:
        if choice == OWN:
            return _stream(lab, domain, count, waves, tokens, seed)
        with lab.regime(choice):
            return _stream(lab, domain, count, waves, tokens, seed)


def _stream(lab: Lab, domain: str, count: int, waves: int, tokens: int, seed: int) -> float:
    """Tokens per second over all batches."""
    seconds = 0.0
    for wave in range(waves):
        played = lab.generate(domain, count, tokens, 1000 * seed + wave)
        seconds += count * tokens / played.tokens_per_second
    return waves * count * tokens / seconds


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    pairs = tuple(one / other for one, other in zip(ours, theirs, strict=True))
    return Spread(pairs).as_json()
