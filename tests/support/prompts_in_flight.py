"""Prompts through an engine under a script, and what the reports then say of acceptance."""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine_shim.sglang.training.dflash import DFlashStudent
from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts
from lab.cpu_engine.models.targets import Qwen3Target, load_target
from lab.harness.scripted_sidecar import Arm, Script, ScriptedSidecar
from speculation.v1.engine_pb2 import StepReport
from tests.support.engine import DFLASH, TARGET, EngineProcess, Generated
from tests.support.eventually import eventually
from trainer.checkpoint import load_dflash

PROMPTS = [
    prompt
    for domain in DOMAINS
    for prompt in held_out_prompts(domain, count=2, length_tokens=48, seed=3)
]
LENGTHS = [24, 72, 40, 60, 21, 50, 66, 35]
SINGLE_PROMPT = held_out_prompts("json", count=1, length_tokens=60, seed=5)
SINGLE_LENGTH = 250
CROWD = [
    prompt
    for domain in DOMAINS
    for prompt in held_out_prompts(domain, count=4, length_tokens=40, seed=11)
]
CROWD_LENGTH = 64
# One batch after the other, of one domain.
WAVES = [held_out_prompts("csv", count=4, length_tokens=60, seed=seed) for seed in range(5)]
WAVE_LENGTH = 150

# Plays until something was seen: only an engine that never shows it gets so far.
PLAYS_MAX = 20


def begin_script(engine: EngineProcess, sidecar: ScriptedSidecar, script: Script) -> int:
    """Begins a script for the very next step; gives the number of reports before it.

    For an engine at rest: the reports of all its steps are here, and it has the script's plan.
    """

    def status() -> dict[str, Any]:
        state: dict[str, Any] = engine.internal_state()["speculation_controller"]
        return state

    def all_reported() -> bool:
        state = status()
        steps = state["reports_sent"] + state["reports_dropped"] + state["reports_invalid"]
        return bool(steps == (sidecar.reports[-1].step if sidecar.reports else 0))

    # It may be asked while the step that was launched beside the last one is on its way, and only
    # the second time after that.
    status()
    eventually(all_reported, description="the reports of all steps have come")
    reports_before = sidecar.run(script)
    newest = len(sidecar.arms)
    eventually(lambda: status()["epoch"] >= newest, description="the engine has the script's plan")
    return reports_before


def play(
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    script: Script,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    lengths: Sequence[int] = LENGTHS,
) -> tuple[list[Generated], list[StepReport]]:
    """Answers to all prompts at once, and the reports of their steps, all under the script."""
    reports_before = begin_script(engine, sidecar, script)
    answers = engine.generate(prompts, lengths)
    rows = sum(answer.meta["spec_verify_ct"] for answer in answers)
    return answers, sidecar.reports_since(reports_before, rows)


def play_until(
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    script: Script,
    is_complete: Callable[[list[StepReport]], bool],
    plain: Sequence[Sequence[int]],
) -> list[StepReport]:
    """Plays all prompts until the reports of all plays show what a test needs; returns them.

    The script counts on from play to play.  Each answer is checked against plain, plain decoding's
    tokens.  On a busy machine a plan comes for every few steps only.
    """
    reports_before = begin_script(engine, sidecar, script)
    rows = 0
    for _ in range(PLAYS_MAX):
        answers = engine.generate(PROMPTS, LENGTHS)
        assert [answer.tokens for answer in answers] == plain
        rows += sum(answer.meta["spec_verify_ct"] for answer in answers)
        reports = sidecar.reports_since(reports_before, rows)
        if is_complete(reports):
            return reports
    pytest.fail(f"{PLAYS_MAX} plays do not show what the test needs")


def play_arm(
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    arm: tuple[str, Arm],
    plain: Sequence[Sequence[int]],
) -> list[StepReport]:
    """Plays until a play ends in that arm, checks each answer, and returns the last play's reports.

    arm: the drafter's name, and what to ask for.  plain: plain decoding's tokens.
    """
    name, script_arm = arm
    for _ in range(PLAYS_MAX):
        answers, reports = play(engine, sidecar, lambda _: script_arm)
        assert [answer.tokens for answer in answers] == plain
        if {(report.drafter, report.gamma) for report in reports[-5:]} == {(name, script_arm[0])}:
            return reports
    pytest.fail(f"{arm} never ran to the end of a play")


def play_any_order(
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    arms: Sequence[Arm],
    seed: int,
    plain: Sequence[Sequence[int]],
    *,
    catches_up: bool = False,
) -> list[StepReport]:
    """Plays under random arms until every arm has run; the reports of all plays.

    catches_up: and until a drafter was caught up after a sleep, since the engine started.

    Each answer is checked against plain, plain decoding's tokens.  On a busy machine a plan comes
    for every few steps only, so one play may meet few arms.
    """
    rng = random.Random(seed)
    every: list[StepReport] = []
    executed_arms: set[tuple[str, int]] = set()
    names = [drafter.name for drafter in sidecar.introductions[-1].drafters]
    requested_arms = {
        (names[drafter_index[0] if drafter_index else 0] if gamma else "", gamma)
        for gamma, _, *drafter_index in arms
    }
    for _ in range(PLAYS_MAX):
        answers, reports = play(engine, sidecar, lambda _: rng.choice(arms))
        assert [answer.tokens for answer in answers] == plain
        every += reports
        executed_arms |= {
            (report.drafter if report.gamma else "", report.gamma) for report in reports
        }
        # A drafter that slept while the lookup drafted may have it draft once more.
        if requested_arms <= executed_arms and not (
            catches_up and not sleep_counts(engine)["caught_up"]
        ):
            return every
    pytest.fail(f"of {sorted(requested_arms)} only {sorted(executed_arms)} ran")


def sleep_counts(engine: EngineProcess) -> dict[str, int]:
    """The engine's own counts of drafters that slept and were caught up."""
    counts: dict[str, int] = engine.internal_state()["speculation_controller"]["sleep"]
    return counts


def accepted_by_context(reports: Sequence[StepReport], drafter: str, gamma: int) -> dict[int, int]:
    """Accepted drafts of a single sequence's steps with that arm, by its context length."""
    return {
        report.kv_tokens: next(k for k, count in enumerate(report.accepted_counts) if count)
        for report in reports
        if (report.drafter, report.gamma) == (drafter, gamma)
    }


def accepted_after_prefill(
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    plain: Sequence[Sequence[int]],
    gamma: int,
) -> list[list[int]]:
    """Drafts of `gamma` that a sequence's first step accepts, by prompt and by known tokens.

    plain: plain decoding's tokens for PROMPTS.  Entry k of a prompt is the step of a sequence whose
    prompt was that prompt and the first k of its tokens: no drafter has slept.
    """
    prompts = [
        [*prompt, *tokens[:known_tokens]]
        for prompt, tokens in zip(PROMPTS, plain, strict=True)
        for known_tokens in range(len(tokens))
    ]
    answers, _ = play(engine, sidecar, lambda _: (gamma, False), prompts, [2] * len(prompts))
    histograms = iter(answer.meta["spec_correct_drafts_histogram"] for answer in answers)
    return [[next(histograms).index(1) for _ in tokens] for tokens in plain]


def compare_rows(
    requests: Sequence[tuple[int, int]],
    reports: Sequence[StepReport],
    expected: Sequence[Sequence[int]],
    gamma: int,
) -> tuple[int, int]:
    """How many rows drafted `gamma`, and how many of those accepted others than expected.

    requests: number in PROMPTS and new tokens of each, as they were asked for at once; reports: all
    of their steps, at γ = 0 or `gamma`; expected: as `accepted_after_prefill` returns it.  Which
    rows a step had, and at which contexts, follows from the steps before it; so the first step with
    another row than expected is the last that is compared.
    """
    waiting = deque(requests)
    rows: list[tuple[int, int, int]] = []
    compared = 0
    for report in reports:
        while len(rows) < report.batch_size:
            rows.append((*waiting.popleft(), 1))
        contexts = [len(PROMPTS[prompt]) + tokens - 1 for prompt, _, tokens in rows]
        assert (len(rows), sum(contexts)) == (report.batch_size, report.kv_tokens)
        accepted = [0] * len(rows)
        if report.gamma:
            assert report.gamma == gamma
            accepted = [expected[prompt][tokens - 1] for prompt, _, tokens in rows]
            compared += len(rows)
            reported = Counter(dict(enumerate(report.accepted_counts)))
            if missing := Counter(accepted) - reported:
                return compared, missing.total()
        rows = [
            (prompt, length, tokens + count + 1)
            for (prompt, length, tokens), count in zip(rows, accepted, strict=True)
            if tokens + count + 1 < length
        ]
    assert not rows
    assert not waiting
    return compared, 0


def check_against_student(
    live: dict[int, int],
    tokens: Sequence[int],
    target: Qwen3Target | None = None,
    student: DFlashStudent | None = None,
) -> None:
    """Whole blocks were accepted as far as the trained student's would have been.

    But for one, or one in thirty: where two tokens are almost equally likely, rounding decides.
    live: as `accepted_by_context`; tokens: the sequence, prompt and answer.  target, student: those
    that ran; None: the shallow ones.
    """
    target = target or load_target(TARGET)
    student = student or load_dflash(DFLASH, target.model.embed_tokens.weight)
    row = torch.tensor([list(tokens)])
    with torch.no_grad():
        _, features = target.logits_and_features(row, student.shape.feature_layers)
    context_features = torch.cat(features, dim=-1)
    compared = wrong = 0
    for context, accepted in live.items():
        if context + 8 > len(tokens):
            continue
        block = student.greedy_block(context_features[:, :context], row[:, : context + 1])[0]
        truth = row[0, context + 1 : context + 8]
        wrong += accepted != int((block == truth).int().cumprod(0).sum())
        compared += 1
    assert compared > 10
    assert wrong <= max(1, compared // 30)
