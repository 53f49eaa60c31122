"""Runs the loop of TIDE: traffic shifts, signals are collected, a trained version serves."""

from typing import Any

from lab.cpu_engine.engine_command import MODELS
from lab.learning.engines_at_work import Lab, LabSetting, running, trainer

# So that minutes show what takes hours in service.
_SMALL = {
    "CONTROLLER_TRAINING__INITIAL": "12",
    "CONTROLLER_TRAINING__MARGIN": "0.15",
    "CONTROLLER_TRAINING__THRESHOLD": "24",
    "CONTROLLER_TRAINING__UNIT_DRAFTS": "64",
}
_MOST_BATCHES = 16
_AFTER = 3


def shift(setting: LabSetting) -> dict[str, Any]:
    """Sends code, then csv, with a drafter of code; once for every seed."""
    return {"runs": [_run(setting, seed) for seed in range(setting.seeds)]}


def _run(setting: LabSetting, seed: int) -> dict[str, Any]:
    name = f"shift-{seed}"
    signals = setting.scratch / f"{name}-signals"
    variables = {"SPECULATION_SIGNALS_FOLDER": str(signals)}
    rows: list[dict[str, Any]] = []
    with (
        running(setting, name, MODELS / "draft-code", (0, 1, 3), variables, _SMALL) as lab,
        trainer(setting, name, signals),
    ):

        def batch(domain: str, number: int) -> None:
            played = lab.generate(domain, 4, 300, 1000 * seed + number)
            rows.append({"domain": domain, **_state(lab, played.acceptance_length)})
            rows[-1]["tokens/s"] = round(played.tokens_per_second, 1)

        for number in range(2 if setting.quick else 5):
            batch("code", number)
        quiet = len(list(signals.glob("*.safetensors")))
        served = 0
        for number in range(2 if setting.quick else _MOST_BATCHES):
            batch("csv", number)
            served += rows[-1]["version served"] > 0
            if served > _AFTER:
                break
        with lab.pinned(0):
            plain = lab.generate("csv", 4, 300, 1000 * seed + 99).tokens_per_second
        past = lab.sidecar.explain(4).training.past
    return {
        "signals kept while traffic was stable": quiet,
        "gamma 0 tokens/s": round(plain, 1),
        "batches": rows,
        "rounds": [
            {
                "outcome": entry.outcome,
                "version": entry.round.version,
                "alpha in service": round(entry.round.alpha_train, 3),
                "alpha held out, before": round(entry.round.alpha_before, 3),
                "alpha held out, after": round(entry.round.alpha_eval, 3),
            }
            for entry in past
        ],
    }


def _state(lab: Lab, acceptance_length: float) -> dict[str, Any]:
    training = lab.sidecar.explain(4).training
    return {
        "acceptance length": round(acceptance_length, 3),
        "phase": training.phase,
        "alpha short": round(training.alpha_short, 3),
        "alpha long": round(training.alpha_long, 3),
        "version served": training.served_version,
    }
