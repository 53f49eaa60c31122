"""Measures test-time speculation by output length."""

from collections.abc import Sequence
from typing import Any

from lab.cpu_engine.engine_command import MODELS
from lab.harness.spread import Spread
from lab.learning.engines_at_work import Lab, LabSetting, Played, by_context, running

_GAMMA = 3
_ONLINE = {"SPECULATION_ONLINE_UPDATES": "1"}
# The drafter is as it was loaded when a request begins.
_PER_REQUEST = {**_ONLINE, "SPECULATION_ONLINE_SCOPE": "request"}
# Drafts that are seen before anything is learnt, and some.
_BASELINE_TOKENS = 400


def length(setting: LabSetting) -> dict[str, Any]:
    """Measures acceptance along one long answer, without updates and with them."""
    tokens, width = (200, 100) if setting.quick else (1500, 250)
    with running(setting, "length", MODELS / "draft-mixed", (0, _GAMMA, 7), _PER_REQUEST) as lab:
        _baseline(lab, "json", 7)
        plain = _without(lab, "json", min(tokens, 400), 0).tokens_per_second
        found: dict[str, Any] = {"domain": "json", "gamma": 7, "gamma 0 tokens/s": round(plain, 1)}
        for regime in ("off", "online:5"):
            curves, plays = [], []
            with lab.regime(regime), lab.pinned(7) as pin:
                for seed in range(setting.seeds):
                    seen = len(pin.reports)
                    plays.append(lab.generate("json", 1, tokens, 100 + seed))
                    curves.append(by_context(pin.reports[seen:], 7, width))
            found[regime] = {
                "acceptance length by context": {
                    str(at): Spread(tuple(c[at] for c in curves if at in c)).as_json()
                    for at in sorted(set().union(*curves))
                },
                **_spreads(plays),
            }
    return found


def _spreads(plays: Sequence[Played]) -> dict[str, Any]:
    return {
        "acceptance length": Spread(tuple(p.acceptance_length for p in plays)).as_json(),
        "tokens/s": Spread(tuple(p.tokens_per_second for p in plays)).as_json(),
    }


def _baseline(lab: Lab, domain: str, gamma: int) -> None:
    """Measures the baseline for updates before any is made."""
    with lab.regime("off"), lab.pinned(gamma):
        lab.generate(domain, 1, _BASELINE_TOKENS, 7)
        while lab.sidecar.status().reports < _BASELINE_TOKENS // 2:
            lab.generate(domain, 1, _BASELINE_TOKENS, 8)


def _without(lab: Lab, domain: str, tokens: int, seed: int, count: int = 1) -> Any:
    with lab.regime("off"), lab.pinned(0):
        lab.generate(domain, count, 16, seed)
        return lab.generate(domain, count, tokens, seed)
