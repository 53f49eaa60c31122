"""Requests of every kind, with graphs and overlap, two drafters and sleep, under random arms.

What docs/losslessness.md claims.  Every answer has to be the one of an engine that only decodes.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import pytest

from lab.cpu_engine.models.prompts import held_out_prompts
from lab.harness.scripted_sidecar import Arm, ScriptedSidecar
from tests.support.engine import DFLASH, EAGLE3, MODES, EngineProcess, running_engine
from tests.support.eventually import eventually
from tests.support.mixture_rules import rules_of
from tests.support.prompts_in_flight import begin_script
from tests.support.reported_counts import count_reports, observed_counts
from tests.support.request_kinds import (
    GREEDY,
    LONG,
    PENALTIES,
    PROMPTS,
    SCHEMA,
    Answers,
    Body,
    check_same,
    request_kinds,
)
from tests.support.target_law import (
    Answer,
    Sampling,
    always_accept,
    law_of_answers,
    p_value,
    power,
    redraw_from_all,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 1, 2, 3, 5, 7)
# The draft length that an engine starts with: the middle of the list.
STARTS_WITH = 3
ARMS: list[Arm] = [
    *((gamma, False, 0) for gamma in GAMMAS),
    *((gamma, False, 1) for gamma in GAMMAS[1:]),
    # A lookup, alone and in a mixture with each drafter.
    *((gamma, False, which) for which in (2, 3, 4) for gamma in (3, 7)),
    (0, True, 0),
]
AWAKE_OR_ASLEEP: list[Arm] = [(0, False, 0), (0, True, 0)]
CHUNK = 64
GRAMMAR = ("--grammar-backend", "xgrammar", "--constrained-json-disable-any-whitespace")
KINDS = list(request_kinds([{"text": "", "output_ids": [0] * 48}] * len(PROMPTS)))


@dataclass(frozen=True)
class Plain:
    """Requests by kind, and how an engine without speculation answers them."""

    requests: dict[str, Body]
    answers: dict[str, Answers]


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """By whole prefills, with the overlap schedule: it delays penalties by a step."""
    overlap = {"CPU_ENGINE_OVERLAP": "1"}
    with running_engine(tmp_path_factory.mktemp("plain"), GRAMMAR, overlap) as engine:
        greedy = engine.ask({"input_ids": PROMPTS, "sampling_params": GREEDY})
        requests = request_kinds(greedy) | PENALTIES
        return Plain(requests, {kind: engine.ask(body) for kind, body in requests.items()})


@pytest.fixture(scope="module")
def engine(
    decoded: Plain, sidecar: ScriptedSidecar, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    variables = {
        **sidecar.variables,
        **MODES["overlapped"],
        "SPECULATION_DFLASH_MODEL_PATH": str(DFLASH),
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_SLEEP_POSITIONS": "12",
        "SPECULATION_LOOKUP": "1",
    }
    sidecar.rules = rules_of(("eagle3+ngram", "dflash+ngram"), GAMMAS)
    options = [
        *EAGLE3, *GRAMMAR, "--enable-metrics",
        "--chunked-prefill-size", str(CHUNK),
        "--cuda-graph-bs-decode", "1", "2", "4", "8", "16",
    ]  # fmt: skip
    with running_engine(tmp_path_factory.mktemp("steered"), options, variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def in_any_order(sidecar: ScriptedSidecar, seed: int) -> None:
    """Lets the arms follow one another at random, from the next steps on."""
    arms = random.Random(seed).choices(ARMS, k=997)
    sidecar.run(lambda count: arms[count % len(arms)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_answers_are_plain_decodings(
    kind: str, seed: int, engine: EngineProcess, sidecar: ScriptedSidecar, decoded: Plain
) -> None:
    in_any_order(sidecar, seed)
    check_same(engine.ask(decoded.requests[kind]), decoded.answers[kind])


def test_the_requests_are_what_they_are_called(engine: EngineProcess, decoded: Plain) -> None:
    """Stops stop, grammars bind, chunks are chunks, and the cache is hit."""
    assert {len(answer["output_ids"]) for answer in decoded.answers["greedy"]} == {48}
    assert decoded.answers["logit bias"][0]["text"] != decoded.answers["greedy"][0]["text"]
    for kind in ("stop strings", "stop tokens"):
        ends = [answer["meta_info"]["finish_reason"]["type"] for answer in decoded.answers[kind]]
        assert set(ends) == {"stop"}
    for answer in decoded.answers["JSON schema"]:
        parsed = json.loads(answer["text"])
        assert parsed.keys() == SCHEMA["properties"].keys()
    assert len(decoded.answers["n"]) == 3 * len(PROMPTS)
    cached = [
        answer["meta_info"]["cached_tokens"]
        for answer in engine.ask(decoded.requests["prefix cache"])
    ]
    assert min(cached) >= len(PROMPTS[0]) + 29
    assert f"#new-token: {CHUNK}," in engine.log.read_text()


@pytest.mark.parametrize("penalty", PENALTIES)
def test_without_drafts_penalties_are_plain_decodings(
    penalty: str, engine: EngineProcess, sidecar: ScriptedSidecar, decoded: Plain
) -> None:
    """Where there are drafts, SGLang itself counts the last token of a step only."""
    arms = random.Random(3).choices(AWAKE_OR_ASLEEP, k=997)
    begin_script(engine, sidecar, lambda count: arms[count % len(arms)])
    assert decoded.answers[penalty][0]["output_ids"] != decoded.answers["greedy"][0]["output_ids"]
    check_same(engine.ask(decoded.requests[penalty]), decoded.answers[penalty])


def test_a_stream_is_the_answer(
    engine: EngineProcess, sidecar: ScriptedSidecar, decoded: Plain
) -> None:
    in_any_order(sidecar, 4)
    with engine.stream({"input_ids": PROMPTS[3], "sampling_params": GREEDY}) as events:
        *_, last = events
    check_same([last], decoded.answers["greedy"][3:])


def test_who_hangs_up_or_is_aborted_disturbs_nobody(
    engine: EngineProcess, sidecar: ScriptedSidecar, decoded: Plain
) -> None:
    in_any_order(sidecar, 5)
    forever = {"input_ids": LONG[3], "sampling_params": GREEDY | {"max_new_tokens": 1500}}
    stayed: list[Answers] = []
    expected = decoded.answers["greedy"]

    def stay() -> None:
        stayed.append(engine.ask(decoded.requests["greedy"]))

    with engine.stream(forever) as hangs_up, engine.stream(forever | {"rid": "aborted"}) as aborted:
        begun = [next(hangs_up), next(aborted)]
        thread = Thread(target=stay)
        thread.start()
        engine.abort("aborted")
        *_, last = aborted
    thread.join(120)
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) < 1500
    for answer in [*begun, last]:
        # The prompt is the chunked one, whose answer is longer or shorter than before.
        known = decoded.answers["chunked prefill"][3]["output_ids"]
        assert all(one == other for one, other in zip(answer["output_ids"], known, strict=False))
    check_same(stayed[0], expected)
    # The rest of the other one is not read: without its abort it would continue for a while.
    eventually(
        lambda: engine.count_running() == 0, timeout_seconds=60.0, description="nothing runs"
    )
    check_same(engine.ask(decoded.requests["greedy"]), expected)
    # SGLang ends itself where its memory is not all free again while it is idle.
    assert engine.process.poll() is None


@dataclass
class Tally:
    """SGLang's own counts of requests that it has answered."""

    requests: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0
    proposed: int = 0
    histogram: Counter[int] = field(default_factory=Counter)

    def add(self, answer: Mapping[str, Any]) -> None:
        meta = answer["meta_info"]
        self.requests += 1
        self.tokens += meta["completion_tokens"]
        self.verified += meta.get("spec_verify_ct", 0)
        self.accepted += meta.get("spec_num_correct_drafts", 0)
        self.proposed += meta.get("spec_num_proposed_drafts", 0)
        for accepted, steps in enumerate(meta.get("spec_correct_drafts_histogram", ())):
            self.histogram[accepted] += steps


def test_counts_are_sglangs_own(
    engine: EngineProcess, sidecar: ScriptedSidecar, decoded: Plain
) -> None:
    """Every kind of end, at every draft length of the first drafter, asleep and awake."""
    eventually(
        lambda: engine.count_running() == 0, timeout_seconds=60.0, description="nothing runs"
    )
    arms: list[Arm] = [*((gamma, False, 0) for gamma in GAMMAS), (0, True, 0)]
    drawn = random.Random(7).choices(arms, k=997)
    before = begin_script(engine, sidecar, lambda count: drawn[count % len(drawn)])
    scraped = engine.counters()
    tally = Tally()
    kinds = ("JSON schema", "regular expression", "EBNF", "stop strings", "stop tokens", "n")
    bodies = [decoded.requests[kind] for kind in kinds]
    bodies += [
        {"input_ids": PROMPTS, "sampling_params": GREEDY | {"max_new_tokens": length}}
        for length in (1, 2, 3)
    ]
    alone = {"custom_params": {"speculation": False}}
    bodies.append({"input_ids": PROMPTS[:2], "sampling_params": GREEDY | alone})
    answers: list[Answers] = []
    threads = [Thread(target=lambda body=body: answers.append(engine.ask(body))) for body in bodies]
    forever = {"input_ids": PROMPTS[3], "sampling_params": GREEDY | {"max_new_tokens": 1500}}
    with engine.stream(forever | {"rid": "counted"}) as events:
        next(events)
        for thread in threads:
            thread.start()
        engine.abort("counted")
        *_, last = events
    for thread in threads:
        thread.join(120)
    assert len(answers) == len(bodies)
    for answer in [last, *(one for part in answers for one in part)]:
        tally.add(answer)
    reports = sidecar.reports_since(before, tally.verified)
    ours = count_reports(reports)
    # Rows, but for those of requests that had ended while their last step was on its way.
    assert ours.sequence_steps == tally.verified
    assert ours.ended_sequences > 0
    assert ours.accepted_tokens == tally.accepted
    assert {k: n for k, n in enumerate(ours.sequences_by_length) if k and n} == {
        k: n for k, n in tally.histogram.items() if k and n
    }
    assert ours.sequences_by_length[0] - ours.ended_sequences == tally.histogram[0]
    # First tokens are of prompts' passes; what was cut off is verified, and not delivered.
    assert ours.delivered_tokens == tally.tokens - tally.requests
    assert ours.generated_tokens > ours.delivered_tokens
    # SGLang counts the draft length of its start in every step, whatever ran.
    assert tally.proposed == STARTS_WITH * tally.verified
    assert ours.drafted_tokens > 0
    assert ours.drafted_tokens == sum(
        group.gamma * sum(group.accepted_counts)
        for report in reports
        for group in (report.groups or [report])
    )

    def counts_agree() -> bool:
        counters = engine.counters()
        verified, tokens = (
            counters[name] - scraped[name] for name in ("spec_verify_calls", "generation_tokens")
        )
        return (verified, tokens) == (ours.sequence_steps, tally.tokens)

    eventually(counts_agree, description="SGLang's counters say the same")


def test_what_lies_behind_the_end_of_an_answer_shows_nothing(
    engine: EngineProcess, sidecar: ScriptedSidecar
) -> None:
    """The prompt's pass gives the first token of three, so that one draft of seven is compared."""
    eventually(
        lambda: engine.count_running() == 0, timeout_seconds=60.0, description="nothing runs"
    )
    before = begin_script(engine, sidecar, lambda _: (7, False, 0))
    three = {"input_ids": PROMPTS * 4, "sampling_params": GREEDY | {"max_new_tokens": 3}}
    answers = engine.ask(three)
    verified = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    reports = sidecar.reports_since(before, verified)
    exact, censored = observed_counts(reports, 7)
    counts = count_reports(reports)
    # Some rows have accepted more than their answers took.
    assert sum(counts.sequences_by_length[3:]) > 0
    assert sum(exact[2:]) == 0
    assert censored[2] == sum(counts.sequences_by_length[2:])


# Tokens of an answer, answers of each sampling, and requests of each at once.
LENGTH, COUNT, ROUND = 4, 900, 90
# About one run in 30,000 fails although all is well: the tail of the G-test is a little heavier.
ALPHA = 1e-5
SAMPLINGS = {
    "top-k": Sampling(1.4, top_k=3),
    "top-p": Sampling(0.8, top_k=4, top_p=0.9),
}
SAMPLED_PROMPTS = {
    "top-k": held_out_prompts("csv", count=3, length_tokens=24, seed=31)[1],
    "top-p": held_out_prompts("prose", count=2, length_tokens=24, seed=31)[1],
    "greedy": PROMPTS[0],
}


@pytest.fixture(scope="module")
def sampled(
    engine: EngineProcess, sidecar: ScriptedSidecar, decoded: Plain
) -> dict[str, Counter[Answer]]:
    """Short answers by who asked, many times each, all mixed; greedy requests among them."""
    in_any_order(sidecar, 6)
    answers_by_sampling: dict[str, Counter[Answer]] = {name: Counter() for name in SAMPLINGS}
    asked = [*SAMPLINGS, "greedy"] * ROUND
    parameters = {
        name: {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
        for name, s in SAMPLINGS.items()
    } | {"greedy": {"temperature": 0}}
    body = {
        "input_ids": [SAMPLED_PROMPTS[name] for name in asked],
        "sampling_params": [
            {"max_new_tokens": LENGTH, "ignore_eos": True, **parameters[name]} for name in asked
        ],
    }
    greedy = decoded.answers["greedy"][0]["output_ids"][:LENGTH]
    for _ in range(COUNT // ROUND):
        for name, answer in zip(asked, engine.ask(body), strict=True):
            if name == "greedy":
                assert answer["output_ids"] == greedy
            else:
                answers_by_sampling[name][tuple(answer["output_ids"])] += 1
    return answers_by_sampling


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_answers_have_the_targets_distribution(
    name: str, sampled: dict[str, Counter[Answer]]
) -> None:
    """A G-test of 900 answers of four tokens against their exact joint distribution.

    Its power at alpha 1e-5 is at least 0.99 for two wrong verifications, if half of the tokens
    behind the first one were drafted, each as the target's likeliest: one that accepts whatever is
    possible, and one that may draw again what it has rejected.
    """
    ask = (SAMPLED_PROMPTS[name], LENGTH, SAMPLINGS[name])
    law = law_of_answers(*ask)
    assert sampled[name].total() == COUNT
    assert p_value(sampled[name], law) > ALPHA
    for wrong in (always_accept, redraw_from_all):
        assert power(law_of_answers(*ask, wrong, drafted=0.5), law, COUNT, ALPHA) > 0.99


def test_all_arms_have_run(engine: EngineProcess, sidecar: ScriptedSidecar) -> None:
    """After all others: none of them was spared what it is about."""
    reports = sidecar.reports
    every = {("eagle3", gamma) for gamma in GAMMAS} | {("dflash", gamma) for gamma in GAMMAS[1:]}
    every |= {(name, g) for name in ("ngram", "eagle3+ngram", "dflash+ngram") for g in (3, 7)}
    ran = {(report.drafter, report.gamma) for report in reports}
    # A drafter that is to wake up lets the lookup draft once more, at the plan's length.
    assert every <= ran <= every | {("ngram", gamma) for gamma in GAMMAS[1:]}
    assert not any(report.flags.eager_fallback for report in reports)
    status = engine.internal_state()["speculation_controller"]
    assert status["sleep"]["slept"] > 0
    assert status["sleep"]["caught_up"] > 0
    assert status["lost"] == []
