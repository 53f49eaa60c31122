"""A paced engine: its steps last as imposed, it accepts what was drawn, and no token changes."""

import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from controller.core.engine_spec import Arm
from lab.cpu_engine.models.prompts import held_out_prompts
from lab.cpu_engine.pace.acceptance import DrawnAcceptance, RequestId
from lab.cpu_engine.pace.pacer import VARIABLE, Pace
from lab.cpu_engine.pace.step_costs import LOOKUP, OWN
from lab.cpu_engine.pace.step_log import LoggedStep, LogPart, read_log
from lab.harness.scripted_sidecar import ScriptedSidecar, scripted_sidecar
from tests.support.engine import (
    EAGLE3,
    START_SECONDS,
    EngineProcess,
    install_plugin,
    running_engine,
    started_engine,
)
from tests.support.eventually import eventually
from tests.support.mixture_rules import rules_of
from tests.support.prompts_in_flight import LENGTHS, PROMPTS, begin_script

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

TABLE = "h100-llama3.1-8b"
DILATION = 6.0
GAMMA = 3
CURVES: dict[str, dict[str, tuple[float, ...]]] = {
    "code": {OWN: (0.8, 0.7, 0.6)},
    "hard": {OWN: (0.2, 0.1)},
}
PACE = Pace(TABLE, DILATION, gammas=(0, 1, GAMMA), curves=CURVES)
CHAINS = (
    *EAGLE3,
    *("--speculative-num-steps", str(GAMMA)),
    *("--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", str(GAMMA + 1)),
)
# Prompts that are never in the prefix cache.
FRESH = "--disable-radix-cache"


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    """One a test, for its one engine."""
    with scripted_sidecar(tmp_path) as scripted:
        yield scripted


def paced(pace: Pace, folder: Path) -> dict[str, str]:
    return {VARIABLE: replace(pace, log=str(log_of(folder))).as_json()}


def log_of(folder: Path) -> Path:
    return folder / "steps.jsonl"


def ended(folder: Path, begin: int, requests: int) -> LogPart:
    """The log from an offset on, once `requests` requests have ended in it."""

    def last_log_part() -> LogPart | None:
        part = read_log(log_of(folder), begin)
        return part if len(part.requests) >= requests else None

    return eventually(last_log_part, description=f"{requests} requests are in the log")


def ask(
    engine: EngineProcess, ids: Sequence[RequestId], prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """How many steps of each request accepted 0, 1, ... drafts, as SGLang counts them."""
    answers = engine.ask(
        {
            "rid": [str(request_id) for request_id in ids],
            "input_ids": list(prompts),
            "sampling_params": [
                {"temperature": 0, "max_new_tokens": request_id.output_tokens, "ignore_eos": True}
                for request_id in ids
            ],
        }
    )
    return [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]


def drawn_steps(request: RequestId) -> list[int]:
    """What each step of a request has to accept, from its draws; the prefill gives a token."""
    drawn = DrawnAcceptance(CURVES)
    steps: list[int] = []
    while (position := sum(steps) + len(steps)) < request.output_tokens - 1:
        steps.append(min(drawn.accepted_at(str(request), OWN, position), GAMMA))
    return steps


def check_times(steps: Sequence[LoggedStep]) -> None:
    """What the pace guarantees: a step lasts as imposed, unless the machine was late."""
    late = 0
    for step in steps:
        if step.late:
            late += 1
            assert step.ended > step.due
        else:
            assert step.ended - step.began == pytest.approx(step.seconds * DILATION, abs=1e-6)
    # A machine that is too busy for every single one shows nothing.
    assert late < len(steps)


def test_steps_last_as_imposed_and_accept_what_was_drawn(tmp_path: Path) -> None:
    costs = PACE.costs()
    lone = RequestId("code", 1, 60)
    crowd = [RequestId("code" if i % 2 else "hard", 10 + i, n) for i, n in enumerate(LENGTHS)]
    with running_engine(tmp_path, (*CHAINS, FRESH), paced(PACE, tmp_path)) as engine:
        begin = eventually(lambda: read_log(log_of(tmp_path)).end, description="a probe")
        ask(engine, [lone], PROMPTS[:1])
        alone = ended(tmp_path, begin, 1)
        counts = ask(engine, crowd, PROMPTS)
        first = ended(tmp_path, alone.end, len(crowd))
        again = ask(engine, crowd, PROMPTS)
        second = ended(tmp_path, first.end, len(crowd))

    steps = [step for step in alone.steps if step.is_decode]
    assert [step.accepted for step in steps] == drawn_steps(lone)
    assert sum(step.tokens for step in steps) == lone.output_tokens - 1
    assert len(set(drawn_steps(lone))) == GAMMA + 1
    for step in steps:
        assert step.seconds == costs.decode_seconds(Arm(OWN, GAMMA), 1, step.kv_tokens)
    prefill = next(step for step in alone.steps if not step.is_decode)
    assert prefill.seconds == costs.prefill_seconds(len(PROMPTS[0]))

    for request, histogram in zip(crowd, counts, strict=True):
        assert Counter(dict(enumerate(histogram))) == Counter(drawn_steps(request))
    assert counts == again
    for part in (first, second):
        assert sum(step.tokens for step in part.steps if step.is_decode) == sum(LENGTHS) - len(
            crowd
        )
        assert {step.rid: step.tokens for step in part.requests} == {
            str(step): step.output_tokens for step in crowd
        }
        check_times(part.steps)
    # Nothing is lost between two steps: one begins when the last one has ended.
    for before, after in zip(first.steps, first.steps[1:], strict=False):
        assert after.began in (before.ended, after.launched)
    assert max(step.kinds.get("hard", 0) for step in first.steps) == len(crowd) / 2


def test_sleep_is_plain_decoding_and_waking_up_is_paid_for(
    tmp_path: Path, sidecar: ScriptedSidecar
) -> None:
    pace = replace(PACE, curves=None)
    costs = pace.costs()
    variables = {
        **sidecar.variables,
        **paced(pace, tmp_path),
        "SPECULATION_GAMMAS": "0,1,3",
    }
    with running_engine(tmp_path, (*EAGLE3, FRESH), variables) as engine:
        begin = eventually(lambda: read_log(log_of(tmp_path)).end, description="a probe")
        eventually(lambda: sidecar.introductions, description="its introduction")
        begin_script(
            engine, sidecar, lambda count: [(0, True), (GAMMA, False), (0, False)][count // 4 % 3]
        )
        engine.generate(PROMPTS[:1], [120])
        steps = [step for step in ended(tmp_path, begin, 1).steps if step.is_decode]
    ran = Counter((step.gamma, step.asleep) for step in steps)
    assert min(ran[0, True], ran[0, False], ran[GAMMA, False]) > 0
    slept = 0
    before = steps[0]
    for step in steps:
        switched = (step.gamma, step.asleep) != (before.gamma, before.asleep)
        expected = costs.decode_seconds(
            Arm(OWN, step.gamma), 1, step.kv_tokens, warm=not step.asleep
        )
        assert step.switch_seconds == (costs.switch_seconds if switched else 0.0)
        caught_up = 0.0 if step.asleep else costs.catch_up_seconds(slept)
        assert step.catch_up_seconds == pytest.approx(caught_up)
        assert step.seconds == pytest.approx(expected + step.switch_seconds + caught_up)
        slept = slept + 1 if step.asleep else 0
        before = step


def test_a_lookup_pays_for_itself_alone_and_beside_a_drafter(
    tmp_path: Path, sidecar: ScriptedSidecar
) -> None:
    pace = replace(PACE, curves=None, lookup=True)
    costs = pace.costs()
    variables = {
        **sidecar.variables,
        **paced(pace, tmp_path),
        "SPECULATION_GAMMAS": "0,1,3",
        "SPECULATION_LOOKUP": "1",
    }
    sidecar.rules = rules_of(("eagle3+ngram",), (0, 1, GAMMA))
    with running_engine(tmp_path, (*EAGLE3, FRESH), variables) as engine:
        begin = eventually(lambda: read_log(log_of(tmp_path)).end, description="a probe")
        eventually(lambda: sidecar.introductions, description="its introduction")
        # The drafters' places: EAGLE3, the lookup, and their mixture.
        begin_script(engine, sidecar, lambda count: (GAMMA, False, count // 4 % 3))
        engine.generate(PROMPTS[:1], [120])
        steps = [step for step in ended(tmp_path, begin, 1).steps if step.is_decode]
    ran = Counter((step.drafter, step.mixed) for step in steps if step.gamma)
    assert min(ran[OWN, False], ran[LOOKUP, False], ran[OWN, True]) > 0
    for step in steps:
        arm = Arm(step.drafter if step.gamma else OWN, step.gamma)
        expected = costs.decode_seconds(arm, 1, step.kv_tokens, warm=not step.asleep)
        assert step.asleep == (step.drafter == LOOKUP)
        # One sequence searches its own context.
        lookup_seconds = costs.lookup_seconds(step.kv_tokens) if step.drafter != LOOKUP else 0.0
        assert step.lookup_seconds == pytest.approx(lookup_seconds)
        extra = step.switch_seconds + step.catch_up_seconds + step.lookup_seconds
        assert step.seconds == pytest.approx(expected + extra)


def test_a_paced_engine_decodes_the_same_tokens_and_reads_prompts_in_chunks(
    tmp_path: Path, plain: dict[str, list[list[int]]]
) -> None:
    log = log_of(tmp_path)
    pace = ("--pace", TABLE, "--dilation", str(DILATION), "--pace-log", str(log))
    chunk = 64
    with running_engine(
        tmp_path, (*pace, *CHAINS, FRESH, "--chunked-prefill-size", str(chunk))
    ) as engine:
        begin = eventually(lambda: read_log(log).end, description="a probe")
        long = held_out_prompts("json", count=1, length_tokens=200, seed=8)
        engine.generate(long, [4], rid="long")
        part = ended(tmp_path, begin, 1)
        answers = engine.generate(PROMPTS, LENGTHS)
        assert [answer.tokens for answer in answers] == plain["batch"]
    prefills = [step for step in part.steps if not step.is_decode]
    assert [step.tokens for step in prefills] == [64, 64, 64, 8]
    (request,) = part.requests
    assert request.first_token == prefills[-1].ended


@pytest.mark.parametrize(
    ("pace", "arguments", "complaint"),
    [
        (replace(PACE, table="h200"), CHAINS, "h200: is neither a file nor one of: tide-"),
        (
            replace(PACE, gammas=(0, 1)),
            CHAINS,
            f"this engine cannot be paced: {TABLE} has no price for the draft lengths [3]",
        ),
        (
            replace(PACE, max_batch_size=4),
            CHAINS,
            "--max-running-requests 16 exceeds the 4 sequences that are priced",
        ),
        (replace(PACE, curves=None), ("--tp-size", "2"), "it has 2 ranks"),
        (replace(PACE, log="/nowhere/steps.jsonl"), CHAINS, "No such file or directory"),
    ],
)
def test_an_engine_that_cannot_be_paced_does_not_start(
    tmp_path: Path, pace: Pace, arguments: Sequence[str], complaint: str
) -> None:
    with started_engine(tmp_path, arguments, {VARIABLE: pace.as_json()}) as engine:
        try:
            assert engine.process.wait(START_SECONDS) != 0
        except subprocess.TimeoutExpired:
            pytest.fail(f"it started:\n{engine.tail()}")
        words = engine.log.read_text(errors="replace")
    (sentence,) = [line for line in words.splitlines() if line.startswith(f"{VARIABLE}: ")]
    assert complaint in sentence
    assert "Traceback" not in words


def test_a_request_that_is_retracted_goes_on_where_it_was(tmp_path: Path) -> None:
    """SGLang retracts every few passes, for its own tests, and reads such requests again."""
    crowd = [RequestId("hard", 40 + i, 40) for i in range(len(PROMPTS))]
    target = "tests.system.engine.sabotage:retract_often"
    retracting = install_plugin(tmp_path / "sabotage", target, name="zz_sabotage")
    variables = {"RETRACT_INTERVAL": "7", "PYTHONPATH": str(retracting), **paced(PACE, tmp_path)}
    with running_engine(tmp_path, (*CHAINS, FRESH), variables) as engine:
        begin = eventually(lambda: read_log(log_of(tmp_path)).end, description="a probe")
        ask(engine, crowd, PROMPTS)
        part = ended(tmp_path, begin, len(crowd))
        assert "Testing retraction" in engine.log.read_text()
    assert {request.rid: request.tokens for request in part.requests} == {
        str(request): request.output_tokens for request in crowd
    }
    prefills = [step for step in part.steps if not step.is_decode]
    # What is read again holds what was decoded before; it is no first token.
    again = sum(step.tokens for step in prefills) - sum(map(len, PROMPTS))
    assert again > len(PROMPTS[0])
    firsts = [request.first_token for request in part.requests]
    assert set(firsts) <= {step.ended for step in prefills}
    assert prefills[-1].ended not in firsts
