"""Plays a moving load steered, on every static arm, and under every other policy.

Static arms, with gamma 0 among them, run in the steered engine while it is held to them.  SGLang's
adaptive mode and decoding without any speculation are engines of their own, beside it.  The steered
engine at gamma 0, its drafters asleep, is compared with the latter under steady loads as well.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lab.gpu_check.budget import Planner, Work
from lab.gpu_check.check import Arm, Check, Contender
from lab.gpu_check.engines import ADAPTIVE, OFF, STEERED
from lab.gpu_check.load import moving_loads, steady_stream
from lab.gpu_check.parts.costs import CostsPart
from lab.gpu_check.parts.part import Document, Part, arm_name, spread, table
from lab.harness.load_generator import Play, paired_ratio, phase_rates
from lab.harness.sidecar import count_decoded_rows
from speculation.v1 import engine_pb2

# Number of the best static arms that are played against the steered engine in turns.
_FINALISTS = 2
# Tokens that a steered engine gains in a step, for the plan; between no draft and the best arm.
_STEERED_TOKENS_A_STEP = 2.0
_OTHER_POLICIES = (ADAPTIVE, OFF)
_ARM = ("eagle3", 0)
_SEED = 9
# Length of an answer, relative to the moving load: most of the time is decoding.
_ANSWER_LENGTH_FACTOR = 2.0


class ArmsPart(Part):
    """Compares the steered engine with every static arm and every other policy."""

    KEY = "arms"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        work = Work() if planner.has_profile else CostsPart().plan(planner)
        loads = moving_loads(planner.shape, planner.scale.answer_share)
        steered = planner.play(loads, tokens_a_step=_STEERED_TOKENS_A_STEP)
        work += planner.count_starts(STEERED) + steered
        for arm in planner.shape.arms():
            work += planner.play(loads, arm)
        work += steered.multiply((_FINALISTS + 1) * planner.scale.repeats)
        for engine_name in _OTHER_POLICIES:
            baseline_work = planner.play(loads) if engine_name == OFF else steered
            work += planner.count_starts(STEERED, engine_name)
            work += (steered + baseline_work).multiply(planner.scale.repeats + 1)
        return work

    def run(self, check: Check) -> None:
        """Plays the load steered, held to each arm, then in turns with the best and the others."""
        check.run_only(STEERED)
        # A sidecar that was started again, as `outage` does, no longer has a profile.
        if not check.sidecar(STEERED).status().profile_id:
            CostsPart().run(check)
        check.terminal.heading("The moving load: steered, every arm in turn, other policies")
        check.run_only(STEERED)
        results: dict[str, Any] = check.document.setdefault(self.KEY, {"arms": [], "over": {}})
        first = check.play(STEERED, check.stream)
        results["steered"] = phase_rates([first]).as_json()
        for arm in check.shape.arms():
            results["arms"].append(_measure_arm(check, arm))
            check.save()
        ranked = sorted(
            results["arms"], key=lambda arm_result: -float(arm_result["tokens_per_second"])
        )
        finalists = [
            (arm_result["drafter"], arm_result["gamma"]) for arm_result in ranked[:_FINALISTS]
        ]
        plays = _play_in_turns(check, [*((STEERED, arm) for arm in finalists), (STEERED, None)])
        steered = plays[STEERED, None]
        results["steered"] = phase_rates(steered).as_json()
        results["over"] = {
            arm_name(*arm): paired_ratio(steered, plays[STEERED, arm]).as_json()
            for arm in finalists
        }
        results["phases"] = _phase_rows(plays)
        check.save()
        for engine_name in _OTHER_POLICIES:
            check.run_only(STEERED, engine_name)
            results["over"][engine_name] = check.measure_ratio(
                (STEERED, None), (engine_name, None), check.stream
            )
            check.save()

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the steered engine's speed over each of the others."""
        results = document[self.KEY]
        ratios_text = "; ".join(
            f"over {name} {spread(ratio)}" for name, ratio in results["over"].items()
        )
        counts = Counter(bool(arm["eager_steps"]) for arm in results["arms"])
        eager = f"; {counts[True]} arms ran steps eagerly" if counts[True] else ""
        return "measured", f"steered tokens/s {ratios_text or 'not compared yet'}{eager}"

    def sections(self, document: Document) -> list[str]:
        """Makes the tables of arms and of phases."""
        results = document[self.KEY]
        rows = [
            [
                arm_name(arm["drafter"], arm["gamma"]),
                f"{arm['tokens_per_second']:.1f}",
                str(arm["steps"]),
                str(arm["eager_steps"]),
                f"{arm['acceptance_length']:.2f}",
            ]
            for arm in results["arms"]
        ]
        columns = ["arm", "tokens/s", "steps", "eager steps", "tokens a verification"]
        texts = ["The moving load, held to one arm:\n\n" + table(columns, rows)]
        if "steered" in results:
            ratios = [[name, spread(ratio)] for name, ratio in results["over"].items()]
            texts.append(
                f"Steered: {spread(results['steered'])} tokens/s.\n\n"
                + table(["steered over", "median (lowest to highest pair)"], ratios)
            )
        if phases := results.get("phases"):
            names = [name for name in phases[0] if name != "phase"]
            rows = [
                [phase["phase"], *(f"{phase[name]['median']:.1f}" for name in names)]
                for phase in phases
            ]
            texts.append("Tokens/s by phase (median):\n\n" + table(["phase", *names], rows))
        return texts


def _measure_arm(check: Check, arm: Arm) -> dict[str, Any]:
    played, pin = check.play_pinned(STEERED, arm, check.stream)
    arm_reports = [report for report in pin.reports if _arm_of(report) == arm]
    verified = sum(map(count_decoded_rows, arm_reports))
    accepted = sum(
        k * count for report in arm_reports for k, count in enumerate(report.accepted_counts)
    )
    return {
        "drafter": arm[0],
        "gamma": arm[1],
        "tokens_per_second": round(played.tokens_per_second, 2),
        "steps": len(arm_reports),
        "eager_steps": sum(report.flags.eager_fallback for report in arm_reports),
        "acceptance_length": round(1 + accepted / max(verified, 1), 3),
    }


def _play_in_turns(check: Check, turns: Sequence[Contender]) -> dict[Contender, list[Play]]:
    plays: dict[Contender, list[Play]] = {turn: [] for turn in turns}
    for repeat in range(check.scale.repeats):
        for turn in turns if repeat % 2 == 0 else turns[::-1]:
            plays[turn].append(check.play_contender(turn, check.stream))
    return plays


def _arm_of(report: engine_pb2.StepReport) -> Arm:
    return (report.drafter if report.gamma else "eagle3", report.gamma)


def _phase_rows(plays: Mapping[Contender, Sequence[Play]]) -> list[dict[str, Any]]:
    """Tokens/s of each phase on the steered engine, and on it when held to each finalist."""
    first_play = next(iter(plays.values()))[0]
    return [
        {
            "phase": phase.phase.name,
            **{
                arm_name(*arm) if arm else "steered": phase_rates(contender_plays, number).as_json()
                for (_, arm), contender_plays in plays.items()
            },
        }
        for number, phase in enumerate(first_play.phases)
    ]


class AsleepPart(Part):
    """Compares sleeping drafters with an engine that has none."""

    KEY = "asleep"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        work = planner.count_starts(STEERED, OFF)
        for size in _batch_sizes(planner.shape.loads):
            loads = steady_stream(
                planner.shape, size, _SEED, _ANSWER_LENGTH_FACTOR * planner.scale.answer_share
            )
            work += planner.play(loads).multiply(2 * (planner.scale.repeats + 1))
        return work

    def run(self, check: Check) -> None:
        """Plays a steady load of each concurrency on both engines in turns."""
        check.terminal.heading("Not speculating: against an engine without speculation")
        check.run_only(STEERED, OFF)
        results = check.document.setdefault(self.KEY, {})
        for size in _batch_sizes(check.shape.loads):
            stream = steady_stream(
                check.shape, size, _SEED, _ANSWER_LENGTH_FACTOR * check.scale.answer_share
            )
            results[str(size)] = check.measure_ratio((STEERED, _ARM), (OFF, None), stream)
            check.save()

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the ratios."""
        ratios = (f"B = {size}: {spread(ratio)}" for size, ratio in document[self.KEY].items())
        return "measured", "tokens/s over an engine without speculation, " + "; ".join(ratios)

    def sections(self, document: Document) -> list[str]:
        """Makes a table of the ratios."""
        rows = [[f"B = {size}", spread(ratio)] for size, ratio in document[self.KEY].items()]
        title = "γ = 0 with sleeping drafters, tokens/s over an engine without speculation:"
        return [f"{title}\n\n" + table(["load", "ratio"], rows)]


def _batch_sizes(loads: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(load.concurrency for load in loads))
