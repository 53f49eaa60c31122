"""Files that `controller simulate` reads: acceptance, costs, arrivals, the published sweep."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lab.papers.drafters import read_grid
from simulator import published_qwen
from simulator.acceptance_trace import AcceptanceTrace
from simulator.curves import parse_acceptance
from simulator.scenarios.scenario_file import load_scenario, scenario_text
from simulator.sources import read_arrivals
from simulator.step_costs import read_profile
from simulator.surface import csv_surface, profile_surface
from tests.support.service_harness import make_profile
from tools.fuzz.mutation import mutate_json
from tools.fuzz.target import refusing, refusing_file

_COSTS = "batch_size,num_draft_tokens,step_seconds\n" + "".join(
    f"{size},{width},{0.01 * width + 0.001 * size}\n" for size in (1, 4, 16) for width in (1, 2, 4)
)
_ARRIVALS = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16T18:15:51.2225670+00:00,879,55
"""
_DATED = "\n".join(_ARRIVALS.splitlines()[:3])
_SECONDS = "timestamp,contexttokens,generatedtokens,more\n0,10,5,x\n1.5,20,7,y\n1.5,30,9,z\n"
_REQUESTS = "".join(
    json.dumps(
        {
            "prompt_token_ids": list(range(20)),
            "acc_eagle": {"acc_len": [1, 3, 2, 4, 1]},
            "acc_ngram": {"acc_len": [1, 1, 2, 1, 1]},
        }
    )
    + "\n"
    for _ in range(3)
)
_SCENARIOS = (
    "wrong-profile/random30",
    "arrivals/rush",
    "context-by-batch/20",
    "recurring/drafters/20",
)
_ROUNDS = "commits,category,a0\n3,chat,0.9\n0,chat,0.1\n2,code,0.5\n"


def _grid() -> Sequence[bytes]:
    row = {"goodput": [100.0] * len(published_qwen.CONCURRENCIES)}
    drafters = {
        name: {"nospec": row, "fixed": [{"gamma": g, **row} for g in range(1, gamma_max + 1)]}
        for name, gamma_max in published_qwen.GAMMA_MAX.items()
    }
    return [json.dumps({"conc": published_qwen.CONCURRENCIES, "drafters": drafters}).encode()]


def _costs(path: Path) -> None:
    surface = csv_surface({"mtp": path}, seconds_per_kv_token=1e-7)
    assert np.isfinite(surface.seconds).all()
    assert (surface.seconds > 0).all()


def _profile(path: Path) -> None:
    surface = profile_surface("given", read_profile(path), {})
    assert np.isfinite(surface.seconds).all()


def _requests(path: Path) -> None:
    AcceptanceTrace.load([path]).pool(np.random.default_rng(0), 5)


def _rounds(path: Path) -> None:
    AcceptanceTrace.load_rounds({"mtp": path}).pool(np.random.default_rng(0), 5)


def _acceptance(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    # A path is for the other targets.
    if ":" in text:
        parse_acceptance(text).pool(np.random.default_rng(0), 3)


TARGETS = (
    refusing_file("simulation.costs", _COSTS, _costs, "costs.csv"),
    refusing_file(
        "simulation.profile",
        lambda: [make_profile().to_json().encode()],
        _profile,
        "profile.json",
        mutate_json,
    ),
    refusing_file(
        "simulation.arrivals",
        lambda: [_DATED.encode(), _SECONDS.encode(), _ARRIVALS.encode()],
        read_arrivals,
        "arrivals.csv",
    ),
    refusing_file("simulation.requests", _REQUESTS, _requests, "requests.jsonl"),
    refusing_file("simulation.rounds", _ROUNDS, _rounds, "rounds.csv"),
    refusing_file(
        "simulation.scenario",
        lambda: [scenario_text(name).encode() for name in _SCENARIOS],
        load_scenario,
        "scenario.yaml",
    ),
    refusing_file("simulation.grid", _grid, read_grid, "sweep.json", mutate_json),
    refusing(
        "simulation.acceptance",
        lambda: [b"geometric:0.7", b"mtp=positions:0.8,0.7; dflash=survival:0.9,0.5,0.5"],
        _acceptance,
    ),
)
