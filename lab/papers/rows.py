"""Measures mixtures on recorded requests: the controller against the best single drafter.

For each file of SpecDecode-Bench (arXiv 2601.11580) and for all of them mixed, at several batch
sizes, the production core chooses among EAGLE, a prompt lookup, their mixture and no drafting, on
the step costs of a modern engine with CUDA graphs on an H100, in milliseconds:

    5.886 + 0.021 B (gamma + 1) + 3.93e-5 kv + 1.2, and with EAGLE 0.5 + 0.45 gamma more

A request of more than `PIECE` output tokens is served in pieces of that length, as requests of
their own.  Otherwise the few that repeat themselves to the limit of the recording would run alone
at the end, or not be seen at all in a run of some thousand steps.  How much of a gain they carry,
a run without the longest requests shows.

`compare` looks at rules that choose a drafter for each row, on recorded requests replayed one by
one.  Every rule but the last knows what a step shows and nothing else: a proposal that agrees with
all tokens of the step, and is longer, counts as what was seen of it or as what was expected,
whichever is more.

    average          running averages of both drafters' accepted tokens, of the request
    table            the mean of the lookup's by match length, and of EAGLE's, over all requests
    table, ratios    the same times the request's two running ratios: the rule of `MixtureRule`
    hindsight        the better of the two proposals, known beforehand: nothing can do better
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from controller.core.acceptance.mixtures import MAX_MATCH_LENGTH, MIN_MATCH_LENGTH
from controller.core.engine_spec import Arm
from simulator.acceptance_trace import AcceptanceTrace, RecordedRequest
from simulator.comparison.contestants import make_controller, static_factories
from simulator.comparison.truth import Truth
from simulator.engine import EngineOptions, RunResult, simulate
from simulator.errors import InvalidInputError
from simulator.process_pool import make_process_pool
from simulator.scenarios.cost import SWITCH_SECONDS, CostSection, ProfileSection
from simulator.scenarios.fields import FieldLocations
from simulator.scenarios.scenario_file import Scenario
from simulator.sources import ClosedSource, PhaseSpec
from simulator.surface import CostSurface

PIECE = 512
MIXTURE = "eagle+ngram"
# Of each drafter, the arms whose runs decide which is its best; a replay chooses them.
_RUN_ARMS = 2
_GAMMAS = list(range(1, 9))
_COST = {
    "formula": {
        "step": {
            "base_seconds": 7.086e-3,
            "seconds_per_token": 2.1e-5,
            "seconds_per_kv_token": 3.93e-8,
        },
        "drafters": {
            "eagle": {
                "kind": "mtp",
                "gammas": _GAMMAS,
                "once_seconds": 5e-4,
                "seconds_per_pass": 4.5e-4,
            },
            "ngram": {"kind": "ngram", "gammas": _GAMMAS},
        },
    },
    "mixtures": {MIXTURE: {"main": "eagle", "free": "ngram"}},
}
GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10)
_WEIGHT = 0.1
# Initial values of the running averages, in tokens.
_EAGLE_FIRST, _LOOKUP_FIRST = 1.0, 0.3
_CONTEXT_TOKENS = 500
# Arguments: drafts accepted if EAGLE drafts, and if the lookup does; match length; gamma.
Step = Callable[[int, int, int, int], int]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Holds the result of one trace at one batch size: rates over that of the best single arm.

    best: its name.  controller_later_rate: in the second half of the tokens.  mixture: of its best
    static arm, with rules learnt in hindsight.  share: of the controller's steps that ran the
    mixture.
    """

    trace: str
    batch_size: int
    steps: int
    best: str
    mixture: float
    controller_rate: float
    controller_later_rate: float
    share: float


def surface(max_batch_size: int) -> CostSurface:
    """Makes the step costs, for batches of up to this size."""
    section = CostSection.model_validate(_COST)
    return section.make_surface(max_batch_size, Path(), FieldLocations("lab.papers rows"))


def in_pieces(trace: AcceptanceTrace, tokens: int = PIECE) -> AcceptanceTrace:
    """Returns the trace with its requests cut into pieces of `tokens` output tokens."""
    return replace(trace, recorded=tuple(p for r in trace.recorded for p in _pieces(r, tokens)))


def _pieces(request: RecordedRequest, tokens: int) -> Iterator[RecordedRequest]:
    for start in range(0, request.positions, tokens):
        end = min(start + tokens, request.positions)
        yield replace(
            request,
            context_tokens=request.context_tokens + start,
            accepted={name: values[start:end] for name, values in request.accepted.items()},
            matches=None if request.matches is None else request.matches[start:end],
        )


def _drop_longer(trace: AcceptanceTrace, longest: int) -> AcceptanceTrace:
    recorded = tuple(r for r in trace.recorded if r.positions <= longest)
    return replace(trace, recorded=recorded)


def run_rows(trace: AcceptanceTrace, batch_size: int, steps: int, seed: int) -> RowRun:
    """Runs the controller and the best static arms for about `steps` steps."""
    costs = surface(max(batch_size, 64))
    acceptance = in_pieces(trace)
    probe = acceptance.pool(np.random.default_rng(0), len(acceptance.recorded))
    tokens_per_step = float(probe.tokens_per_step("eagle", [4])[0])
    phase = PhaseSpec("rows", acceptance, batch_size, round(steps * batch_size * tokens_per_step))
    requests = 2 * len(acceptance.recorded)
    source = ClosedSource((phase,), None, None, requests)
    scenario = Scenario(
        "rows", "rows", "", costs, source,
        ProfileSection().make_profile(costs, FieldLocations("lab.papers rows")),
        costs.max_batch_size,
        shifting=False, options=EngineOptions(switch_seconds=SWITCH_SECONDS),
    )  # fmt: skip
    workload = source(seed)
    truth = Truth(workload, costs)

    kv = batch_size * float((probe.context_tokens + probe.output_tokens / 2).mean())
    value = (1 + truth.replay_of(workload.phases[0].pool).expected) / costs.step_seconds(
        batch_size, kv
    )
    factories = static_factories(costs, truth.rules)
    runs: dict[str, dict[str, RunResult]] = {}
    for name in _promising_arms(costs, value):
        drafter = name.rpartition("-")[0]
        runs.setdefault(drafter, {})[name] = simulate(
            workload, costs, factories[name](), scenario.options, seed
        )
    controller_run = simulate(workload, costs, make_controller(scenario), scenario.options, seed)
    mixture_runs = runs.pop(f"static-{MIXTURE}")
    single = {name: run for by_arm in runs.values() for name, run in by_arm.items()}
    best = max(single, key=lambda name: single[name].tokens_per_second)
    drafters = [costs.arms[arm].drafter for arm in controller_run.trace.arms]
    return RowRun(
        trace.name,
        batch_size,
        controller_run.steps,
        best,
        max(run.tokens_per_second for run in mixture_runs.values())
        / single[best].tokens_per_second,
        controller_run.tokens_per_second / single[best].tokens_per_second,
        _second_half_rate(controller_run) / _second_half_rate(single[best]),
        drafters.count(MIXTURE) / controller_run.steps,
    )


def _promising_arms(costs: CostSurface, value: np.ndarray) -> Iterator[str]:
    """Names the best static arms of each drafter by a replay, and no drafting."""
    yield "off"
    for drafter in costs.drafters:
        drafter_arms = [Arm(drafter.name, gamma) for gamma in drafter.gammas if gamma]
        drafter_arms.sort(key=lambda arm: -value[costs.arms.index(arm)])
        yield from (f"static-{arm.drafter}-{arm.gamma}" for arm in drafter_arms[:_RUN_ARMS])


def _second_half_rate(run: RunResult) -> float:
    """Tokens per second in the second half of a run's tokens."""
    tokens = np.cumsum(run.trace.tokens)
    half = int(np.searchsorted(tokens, tokens[-1] / 2))
    return float((tokens[-1] - tokens[half]) / (run.trace.ends[-1] - run.trace.ends[half]))


def run_all(
    files: Sequence[Path],
    batch_sizes: Sequence[int],
    steps: int,
    seed: int = 0,
    processes: int | None = None,
    longest: int = 0,
) -> list[RowRun]:
    """Runs each file, and all of them mixed where there are several, at every batch size.

    longest: requests with more output tokens are left out; 0 = none are.  Raises InvalidInputError.
    """
    traces = [AcceptanceTrace.load([file]) for file in files]
    if len(files) > 1:
        traces.append(replace(AcceptanceTrace.load(files), name="all"))
    if longest:
        traces = [_drop_longer(trace, longest) for trace in traces]
    tasks = [(trace, size, steps, seed) for trace in traces for size in batch_sizes]
    with make_process_pool(processes) as pool:
        return list(pool.map(run_rows, *zip(*tasks, strict=True)))


def table(runs: Sequence[RowRun]) -> Table:
    """Shows one row for each trace and batch size."""
    result_table = Table(
        title="Rates over that of the best single static arm", title_justify="left"
    )
    for column in ("trace", "best single arm"):
        result_table.add_column(column)
    for column in ("B", "steps", "mixture, static", "controller", "second half", "mixture's steps"):
        result_table.add_column(column, justify="right")
    for run in runs:
        result_table.add_row(
            run.trace, run.best, str(run.batch_size), str(run.steps), f"{run.mixture:.3f}",
            f"{run.controller_rate:.3f}", f"{run.controller_later_rate:.3f}", f"{run.share:.0%}",
        )  # fmt: skip
    return result_table


@dataclass(slots=True)
class Means:
    """Holds what all requests so far have shown: sums and counts, of EAGLE and by match length."""

    eagle: list[float]
    lookup: list[list[float]]

    @classmethod
    def initial(cls) -> "Means":
        """Returns means that count as a few steps each."""
        return cls([4.0, 4.0], [[0.5 * length, 4.0] for length in range(MAX_MATCH_LENGTH + 1)])


def _credited_tokens(potential: int, accepted: int, gamma: int, expected: float) -> float:
    """Returns the tokens that a proposal is credited with in a step that accepted `accepted`."""
    if potential <= accepted or accepted + 1 >= gamma:
        return potential
    return max(accepted + 1, expected)


def _average(_: Means) -> Step:
    average = [_EAGLE_FIRST, _LOOKUP_FIRST]

    def step(eagle: int, lookup: int, __: int, gamma: int) -> int:
        accepted = lookup if average[1] > average[0] else eagle
        for side, would in enumerate((eagle, lookup)):
            value = _credited_tokens(would, accepted, gamma, average[side])
            average[side] += _WEIGHT * (value - average[side])
        return accepted

    return step


def _table(means: Means, weight: float) -> Step:
    ratios = [1.0, 1.0]

    def step(eagle: int, lookup: int, match: int, gamma: int) -> int:
        tables = (means.eagle, means.lookup[min(match, MAX_MATCH_LENGTH)])
        expected = [total / count for total, count in tables]
        finds = match >= MIN_MATCH_LENGTH
        accepted = eagle
        if finds and ratios[1] * expected[1] > ratios[0] * expected[0]:
            accepted = lookup
        for side, would in enumerate((eagle, lookup) if finds else (eagle,)):
            value = _credited_tokens(would, accepted, gamma, ratios[side] * expected[side])
            ratios[side] += weight * (value / max(expected[side], 1e-3) - ratios[side])
            tables[side][0] += value
            tables[side][1] += 1
        return accepted

    return step


RULES: Mapping[str, Callable[[Means], Step]] = {
    "EAGLE": lambda _: lambda eagle, *__: eagle,
    "lookup": lambda _: lambda __, lookup, *___: lookup,
    "average": _average,
    "table": lambda means: _table(means, 0.0),
    "table, ratios": lambda means: _table(means, _WEIGHT),
    "hindsight": lambda _: lambda eagle, lookup, *__: max(eagle, lookup),
}


def mean_tokens_per_step(requests: Sequence[RecordedRequest], gamma: int, rule: str) -> float:
    """Returns the mean tokens of a step when each request is replayed alone."""
    means, tokens, steps = Means.initial(), 0, 0
    for request in requests:
        eagle = np.minimum(request.accepted["eagle"], gamma).tolist()
        lookup = np.minimum(request.accepted["ngram"], gamma).tolist()
        assert request.matches is not None
        match = request.matches.tolist()
        step, position = RULES[rule](means), 0
        while position < request.positions:
            step_tokens = step(eagle[position], lookup[position], match[position], gamma) + 1
            tokens, steps, position = tokens + step_tokens, steps + 1, position + step_tokens
    return tokens / steps


def step_milliseconds(batch_size: int, gamma: int, *, drafts: bool) -> float:
    """Returns the step costs of `lab.papers.rows`, at a context of 500 tokens."""
    verified = 7.086 + 0.021 * batch_size * (gamma + 1)
    drafting = 0.5 + 0.45 * gamma if drafts else 0.0
    return verified + 3.93e-5 * batch_size * _CONTEXT_TOKENS + drafting


def compare(files: Sequence[Path], batch_sizes: Sequence[int]) -> Table:
    """Returns the rate of each rule at its best draft length over that of the best single arm.

    Raises InvalidInputError: files without `ngram`, `eagle` or the tokens that matches follow from.
    """
    result_table = Table(title="Rates over that of the best single arm", title_justify="left")
    result_table.add_column("trace")
    for column in ("B", *RULES):
        result_table.add_column(column, justify="right")
    for file in files:
        requests = AcceptanceTrace.load([file]).recorded
        for request in requests:
            if request.matches is None or not {"eagle", "ngram"} <= request.accepted.keys():
                raise InvalidInputError(file, 0, "eagle, ngram and all tokens must be recorded")
        tokens_by_rule = {
            (rule, gamma): mean_tokens_per_step(requests, gamma, rule)
            for rule in RULES
            for gamma in GAMMAS
        }
        for batch_size in batch_sizes:
            rates = {
                rule: max(
                    tokens_by_rule[rule, gamma]
                    / step_milliseconds(batch_size, gamma, drafts=rule != "lookup")
                    for gamma in GAMMAS
                )
                for rule in RULES
            }
            plain_rate = 1 / step_milliseconds(batch_size, 0, drafts=False)
            best = max(rates["EAGLE"], rates["lookup"], plain_rate)
            cells = [f"{rate / best:.3f}" for rate in rates.values()]
            result_table.add_row(file.stem, str(batch_size), *cells)
    return result_table
