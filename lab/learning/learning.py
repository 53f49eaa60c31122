"""Measures test-time speculation: by stride, and as the sidecar decides."""

from collections.abc import Sequence
from typing import Any

from lab.cpu_engine.engine_command import MODELS
from lab.harness.spread import Spread
from lab.learning.engines_at_work import Lab, LabSetting, Played, running

_STRIDES = (0, 50, 20, 10, 5, 2, 1)
_GAMMA = 3
_ONLINE = {"SPECULATION_ONLINE_UPDATES": "1"}
# The drafter is as it was loaded when a request begins.
_PER_REQUEST = {**_ONLINE, "SPECULATION_ONLINE_SCOPE": "request"}
# Drafts that are seen before anything is learnt, and some.
_BASELINE_TOKENS = 400


def strides(setting: LabSetting) -> dict[str, Any]:
    """Measures a drafter of code on csv at every stride, each from the same first weights."""
    tokens = 96 if setting.quick else 500
    with running(setting, "strides", MODELS / "draft-code", (0, _GAMMA), _PER_REQUEST) as lab:
        _baseline(lab, "csv", _GAMMA)
        plain = _without(lab, "csv", tokens, 0).tokens_per_second
        rows: dict[str, Any] = {}
        first: tuple[tuple[int, ...], ...] | None = None
        for stride in (0, 5) if setting.quick else _STRIDES:
            regime = f"online:{stride}" if stride else "off"
            with lab.regime(regime), lab.pinned(_GAMMA):
                plays = [lab.generate("csv", 1, tokens, 200 + s) for s in range(setting.seeds)]
            # The first stride is off.
            first = first or plays[0].tokens
            rows[regime] = {
                **_spreads(plays),
                "same tokens as without updates": plays[0].tokens == first,
            }
    return {"domain": "csv", "gamma": _GAMMA, "gamma 0 tokens/s": round(plain, 1), "by": rows}


def regime(setting: LabSetting) -> dict[str, Any]:
    """Measures the same drafter under the sidecar's own decision, batch after batch."""
    waves = 2 if setting.quick else 10
    with running(setting, "regime", MODELS / "draft-code", (0, 1, _GAMMA), _ONLINE) as lab:
        rows = []
        for wave in range(waves):
            played = lab.generate("csv", 4, 250, wave)
            explained = lab.sidecar.explain(4)
            chosen = [value.stride for value in explained.updates.strides if value.chosen]
            rows.append(
                {
                    "acceptance length": round(played.acceptance_length, 3),
                    "tokens/s": round(played.tokens_per_second, 1),
                    "gamma": lab.sidecar.status().last_report.gamma,
                    "stride": chosen[0] if chosen else 0,
                    "updates": explained.updates.updates,
                }
            )
        plain = _without(lab, "csv", 250, 1, 4).tokens_per_second
    return {"domain": "csv", "gamma 0 tokens/s": round(plain, 1), "batches": rows}


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
