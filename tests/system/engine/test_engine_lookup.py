"""Prompt lookup in one real SGLang: alone, beside two drafters, and mixed with them row by row."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.error import HTTPError

import pytest

from lab.conformance.shim_side import ShimCheck
from lab.harness.scripted_sidecar import Arm, ScriptedSidecar, scripted_sidecar
from speculation.v1.engine_pb2 import (
    DRAFTER_KIND_MIXTURE,
    DRAFTER_KIND_NGRAM,
    StepReport,
)
from speculation.v1.plan_pb2 import MixtureRule
from tests.support.engine import DFLASH, EAGER_NIGHTLY, EAGLE3, MODES, EngineProcess, running_engine
from tests.support.eventually import eventually
from tests.support.mixture_rules import rules_of
from tests.support.prompt_lookup import look_up
from tests.support.prompts_in_flight import (
    LENGTHS,
    PLAYS_MAX,
    PROMPTS,
    SINGLE_LENGTH,
    SINGLE_PROMPT,
    accepted_by_context,
    begin_script,
    play,
    play_any_order,
    play_arm,
)
from tests.support.waits import WAITS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 1, 3, 7)
NAMES = ("eagle3", "dflash", "ngram", "eagle3+ngram", "dflash+ngram")
LOOKUP = 2
# More than the prompts of the other tests have.
SYSTEM_TOKENS = 96
# A drafter that has just woken drafts worse at some contexts: fewer than these say little of it.
FRESH_CONTEXTS = 20
ARMS: list[Arm] = [
    (0, False, 0),
    (0, True, 0),
    *[(gamma, False, which) for which in range(len(NAMES)) for gamma in GAMMAS[1:]],
]


def rules(main_expected: float, *free_expected: float) -> tuple[MixtureRule, ...]:
    return rules_of(NAMES[3:], GAMMAS, main_expected, free_expected)


@pytest.fixture(scope="module", params=[EAGER_NIGHTLY, "overlapped"])
def mode(request: pytest.FixtureRequest) -> str:
    """How an engine runs its passes: the first of `MODES`, and the last."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def sidecar(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedSidecar]:
    """One for each mode's engine."""
    with scripted_sidecar(tmp_path_factory.mktemp(f"sidecar-{mode}")) as scripted:
        scripted.rules = rules_of(NAMES[3:], GAMMAS)
        yield scripted


@pytest.fixture(scope="module")
def waits(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine lists what would wait for a device."""
    return tmp_path_factory.mktemp(f"waits-{mode}") / "waits.json"


@pytest.fixture(scope="module")
def engine(
    mode: str, sidecar: ScriptedSidecar, waits: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("of this engine alone\n")
    variables = {
        **sidecar.variables,
        **MODES[mode],
        "CPU_ENGINE_SYNCHRONISATIONS": str(waits) if mode == "overlapped" else "",
        "SPECULATION_LOOKUP": "1",
        "SPECULATION_CLASSES": "label,grammar,prompt,adapter",
        "SPECULATION_CLASS_KEY_FILE": str(key),
        "SPECULATION_CLASS_PROMPT_TOKENS": str(SYSTEM_TOKENS),
        "SPECULATION_DFLASH_MODEL_PATH": str(DFLASH),
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_SLEEP_POSITIONS": "12",
    }
    options = (*EAGLE3, "--chat-template", "chatml")
    with running_engine(tmp_path_factory.mktemp("steered"), options, variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def test_it_introduces_the_lookup_and_two_mixtures(
    engine: EngineProcess, sidecar: ScriptedSidecar
) -> None:
    drafters = sidecar.introductions[0].drafters
    assert tuple(drafter.name for drafter in drafters) == NAMES
    assert drafters[LOOKUP].kind == DRAFTER_KIND_NGRAM
    for drafter, main in zip(drafters[3:], NAMES, strict=False):
        assert drafter.kind == DRAFTER_KIND_MIXTURE
        assert (drafter.mixture.main, drafter.mixture.free) == (main, "ngram")
        assert tuple(drafter.gammas) == GAMMAS[1:]


def test_memory_was_left_for_what_the_lookup_takes(engine: EngineProcess) -> None:
    log = engine.log.read_text()
    (left,) = re.findall(r"MiB are kept free .*, and ([\d.]+) for prompt lookup", log)
    (lookup_mib,) = re.findall(r"keeps ([\d.]+) MiB of tokens, and takes ([\d.]+) MiB with", log)
    kept, taken = map(float, lookup_mib)
    # The request pool's rows are longer than the longest context; a page is added at most.
    assert 0 < kept < taken <= float(left) <= taken + 0.1


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_arms_gives_plain_decodings_tokens(
    seed: int, engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    play_any_order(engine, sidecar, ARMS, seed, plain["batch"])


def test_the_lookup_drafts_what_followed_the_longest_match(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    tokens = [*PROMPTS[0], *plain["batch"][0]]
    live: dict[int, int] = {}
    matches: dict[int, int] = {}
    for _ in range(PLAYS_MAX):
        # One request at a time, so that every context is met with its own reports.
        _, played = play(engine, sidecar, lambda _: (7, False, LOOKUP), PROMPTS[:1], LENGTHS[:1])
        reports = [report for report in played if is_whole(report)]
        live |= accepted_by_context(reports, "ngram", 7)
        matches |= {
            report.kv_tokens: report.proposals[0].match_length
            for report in reports
            if report.drafter == "ngram"
        }
        # On a busy machine a plan comes for every few steps only.
        if len(live) > 5:
            break
    assert len(live) > 5
    for context, accepted in live.items():
        known, truth = tokens[: context + 1], tokens[context + 1 : context + 8]
        match, drafts = look_up(known, 7)
        assert matches[context] == match
        if len(truth) == 7 and match:
            agreed = next((k for k in range(7) if drafts[k] != truth[k]), 7)
            assert accepted == agreed


def test_without_drafts_first_tokens_are_compared_with_what_is_decoded(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    """They agree where a draft of one token would have been accepted.

    But for one, or one in thirty: where two tokens are almost equally likely, rounding decides.
    """
    _, reports = play(engine, sidecar, lambda _: (1, False, 0), PROMPTS[:1], LENGTHS[:1])
    accepted = accepted_by_context(reports, "eagle3", 1)
    answers, reports = play(engine, sidecar, lambda _: (0, False, 0), PROMPTS[:1], LENGTHS[:1])
    assert answers[0].tokens == plain["batch"][0]
    compared = different = 0
    for report in reports:
        parts = {part.drafter: list(part.accepted_counts) for part in report.proposals}
        assert set(parts) == {"eagle3", "ngram"}
        assert not any(any(part.censored_counts) for part in report.proposals)
        if report.kv_tokens in accepted:
            compared += 1
            different += parts["eagle3"] != ([0, 1] if accepted[report.kv_tokens] else [1, 0])
        known = [*PROMPTS[0], *plain["batch"][0]]
        next_position = report.kv_tokens + 1
        match, drafts = look_up(known[:next_position], 1)
        if next_position < len(known):
            assert parts["ngram"] == (
                [0, 1] if match and drafts == known[next_position : next_position + 1] else [1, 0]
            )
    assert compared > 5
    assert different <= max(1, compared // 30)


def test_a_drafter_that_slept_while_the_lookup_drafted_has_missed_nothing(
    mode: str,
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    plain: dict[str, list[list[int]]],
) -> None:
    def naps(first: int, count: int) -> Arm:
        # Of 2, 5 and 20 steps: shorter and longer than the buffer of 12.
        step = (first + count) % 40
        return (3, False, LOOKUP if step in (4, 5) or 9 <= step < 14 or step >= 20 else 0)

    def sleep() -> dict[str, int]:
        sleep_state: dict[str, int] = engine.internal_state()["speculation_controller"]["sleep"]
        return sleep_state

    awake: dict[int, int] = {}
    for script in (lambda _: (3, False, 0), lambda count: (3 * (count % 2), False, 0)):
        answers, reports = play(engine, sidecar, script, SINGLE_PROMPT, [SINGLE_LENGTH])
        assert answers[0].tokens == plain["alone"][0]
        awake |= accepted_by_context(reports, "eagle3", 3)

    before = sleep()
    # By context: steps that follow one of the lookup, and all others.
    fresh: dict[int, int] = {}
    later: dict[int, int] = {}
    for number in range(PLAYS_MAX):
        # On a quiet machine every play of one script is the same, and shows the same few contexts.
        shifted = partial(naps, 7 * number)
        answers, reports = play(engine, sidecar, shifted, SINGLE_PROMPT, [SINGLE_LENGTH])
        assert answers[0].tokens == plain["alone"][0]
        accepted = accepted_by_context(reports, "eagle3", 3)
        woken = {
            after.kv_tokens
            for first, after in itertools.pairwise(reports)
            if (first.drafter, after.drafter) == ("ngram", "eagle3")
        }
        fresh |= {
            context_length: accepted[context_length]
            for context_length in woken & accepted.keys() & awake.keys()
        }
        later |= {
            context_length: k
            for context_length, k in accepted.items()
            if context_length in awake and context_length not in woken
        }
        slept = {name: count - before[name] for name, count in sleep().items()}
        if slept["slept"] > 40 and len(fresh) > FRESH_CONTEXTS and len(later) > 10:
            break
    assert slept["slept"] > 40
    assert slept["caught_up"] > slept["slept"]
    assert slept["cold"] == 0
    assert len(fresh) > FRESH_CONTEXTS
    assert len(later) > 10
    assert later == {context: awake[context] for context in later}
    expected = {context: awake[context] for context in fresh}
    print(f"accepted after a nap {sum(fresh.values())}, always awake {sum(expected.values())}")
    if mode == "eager":
        assert fresh == expected
    else:
        # It begins with what it reads while the lookup drafts once more; the last tokens that it
        # slept through are read behind that.
        assert sum(fresh.values()) >= 0.5 * sum(expected.values()) > 0


@pytest.mark.parametrize("main", [0, 1])
def test_a_mixture_uses_both_and_reports_what_each_would_have_given(
    main: int, engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    name = NAMES[3 + main]
    rows: Counter[str] = Counter()
    for _ in range(PLAYS_MAX):
        for report in play_arm(engine, sidecar, (name, (3, False, 3 + main)), plain["batch"]):
            if report.drafter == name:
                check_counts(report)
                for group in report.groups:
                    rows[group.drafter] += sum(group.accepted_counts)
        if min(rows[NAMES[main]], rows["ngram"]) > 20:
            return
    pytest.fail(f"the rows of a mixture used {dict(rows)}")


def check_counts(report: StepReport, rows: int = 0) -> None:
    """All rows are in one group, and each drafter's proposals are of all rows that it may draft."""
    total = [0] * (report.gamma + 1)
    for group in report.groups:
        for k, count in enumerate(group.accepted_counts):
            total[k] += count
    assert total == list(report.accepted_counts)
    by_drafter: Counter[str] = Counter()
    for part in report.proposals:
        by_drafter[part.drafter] += sum(part.accepted_counts) + sum(part.censored_counts)
        # What a step cannot show lies behind its last token.
        assert not part.censored_counts or part.censored_counts[0] == 0
    of_all = rows or report.batch_size
    if is_whole(report):
        assert set(by_drafter.values()) == {of_all}
    else:
        # A row that was cut behind its first token shows nothing of its drafts.
        assert max(by_drafter.values(), default=0) <= of_all


def is_whole(report: StepReport) -> bool:
    """Whether the answers took all tokens of a step: none had ended, none was cut at its end."""
    token_count = sum((k + 1) * count for k, count in enumerate(report.accepted_counts))
    return token_count == report.delivered_tokens and not any(
        group.ended for group in report.groups
    )


def test_beside_its_main_drafter_alone_a_mixture_would_have_given_what_its_rule_says(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    kept, sidecar.rules = sidecar.rules, rules(64.0, 0.0)
    try:
        # A rule that never prefers the lookup: the mixture is its main drafter.
        reports = play_arm(engine, sidecar, ("eagle3", (3, False, 0)), plain["batch"])
    finally:
        sidecar.rules = kept
    steps = [
        report
        for report in reports
        if (report.drafter, report.gamma) == ("eagle3", 3) and is_whole(report)
    ]
    assert len(steps) > 10
    for report in steps[-5:]:
        (mixture,) = [part for part in report.proposals if part.drafter == "eagle3+ngram"]
        assert list(mixture.accepted_counts) == list(report.accepted_counts)
        assert not report.groups


def test_the_rule_decides_which_rows_use_the_lookup(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    kept, sidecar.rules = sidecar.rules, rules(0.0, 5.0)
    try:
        reports = play_arm(engine, sidecar, ("eagle3+ngram", (3, False, 3)), plain["batch"])
    finally:
        sidecar.rules = kept
    # Wherever it has found a match: in the last steps, that is, after the plan has come.
    for report in [report for report in reports if is_whole(report)][-5:]:
        lookup_accepted = sum(
            sum(part.accepted_counts)
            for part in report.proposals
            if (part.drafter, part.match_length) == ("ngram", 0)
        )
        own = sum(sum(g.accepted_counts) for g in report.groups if g.drafter == "eagle3")
        assert own == lookup_accepted


def test_other_requests_in_the_same_rows_are_out_of_reach(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    """What a request of before has left in a row is never found."""
    choose = random.Random(4)
    prompt = [choose.randrange(200, 400) for _ in range(40)]
    play(engine, sidecar, lambda _: (3, False, LOOKUP), [prompt], [4])
    # All distinct tokens: a match could only come from the row's last owner.
    fresh = choose.sample(range(200, 400), 30)
    _, reports = play(engine, sidecar, lambda _: (3, False, LOOKUP), [fresh], [2])
    (first, *_) = reports
    assert [part.match_length for part in first.proposals] == [0]


@pytest.mark.parametrize("which", [0, 1, LOOKUP, 3])
def test_a_request_that_must_not_be_drafted_for_is_a_group_of_its_own(
    which: int, engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    together: list[StepReport] = []
    # On a busy machine the two requests may run together for a few steps only.
    for _ in range(PLAYS_MAX):
        before = begin_script(engine, sidecar, lambda _: (3, False, which))
        answers, reports = ask_apart(engine, sidecar, before, {"speculation": False})
        assert answers == plain["batch"][:2]
        together += [r for r in reports if r.batch_size == 2 and is_whole(r)]
        if len(together) > 5:
            break
    assert len(together) > 5
    for report in together:
        assert report.gamma == 3
        (none,) = [group for group in report.groups if not group.drafter]
        assert (none.gamma, list(none.accepted_counts)) == (0, [1])
        check_counts(report, rows=1)
    alone = [report for report in reports if report.batch_size == 1]
    # It continues alone for longer than the other one, at any draft length one token a step.
    assert all(report.accepted_counts[0] == 1 for report in alone[-5:])


def ask_apart(
    engine: EngineProcess, sidecar: ScriptedSidecar, before: int, wish: dict[str, object]
) -> tuple[list[list[int]], list[StepReport]]:
    """Two requests at once, of which the second has a wish, and the reports of their steps.

    before: how many reports there are.
    """
    parameters: list[dict[str, object]] = [
        {"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in LENGTHS[:2]
    ]
    parameters[1]["custom_params"] = wish
    answers = engine.ask({"input_ids": PROMPTS[:2], "sampling_params": parameters})
    rows = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    tokens = [answer["output_ids"] for answer in answers]
    return tokens, sidecar.reports_since(before, rows)


def test_requests_are_reported_by_the_class_that_clients_name(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    before = begin_script(engine, sidecar, lambda _: (3, False, 0))
    answers, reports = ask_apart(engine, sidecar, before, {"speculation_class": "invoices\n"})
    assert answers == plain["batch"][:2]
    for report in reports:
        counts = {part.label: list(part.accepted_counts) for part in report.classes}
        # The other request has no class.
        assert set(counts) <= {"invoices"}
        if report.batch_size == 2:
            assert sum(counts["invoices"]) == 1


def test_the_openai_api_hands_a_wish_on(engine: EngineProcess, sidecar: ScriptedSidecar) -> None:
    before = begin_script(engine, sidecar, lambda _: (3, False, 0))
    answer = engine.complete({"speculation_class": "letters"})
    assert answer["choices"][0]["text"]
    eventually(
        lambda: any(
            part.label == "letters" for r in sidecar.reports[before:] for part in r.classes
        ),
        description="a report with the class",
    )


def test_chats_with_one_system_prompt_are_a_class_from_the_second_one_on(
    engine: EngineProcess, sidecar: ScriptedSidecar
) -> None:
    begin_script(engine, sidecar, lambda _: (3, False, 0))

    def hashes(system: str, label: str) -> set[str]:
        """Those in a chat's reports; label: of a chat after it, which shows that all have come."""
        before = len(sidecar.reports)
        engine.chat(system, f"Is this {label}?")
        engine.chat("Short.", "And this?", custom_params={"speculation_class": label})

        def token_hashes() -> set[str]:
            return {part.label for report in sidecar.reports[before:] for part in report.classes}

        eventually(lambda: label in token_hashes(), description="a report of the chat after it")
        return {name for name in token_hashes() if re.fullmatch("[0-9a-f]{8}", name)}

    first, second = (f"You read {name}. " * SYSTEM_TOKENS for name in ("invoices", "letters"))
    assert hashes(first, "the first request") == set()
    (own,) = hashes(first, "the second request")
    assert hashes(second, "the first one of another") == set()
    (other,) = hashes(second, "the second one of another")
    assert hashes(first, "the third request") == {own} != {other}


def test_an_adapter_that_is_asked_for_is_refused_and_no_class(
    engine: EngineProcess, sidecar: ScriptedSidecar
) -> None:
    """A steered SGLang has no adapters."""
    with pytest.raises(HTTPError, match="400"):
        engine.chat("Short.", "What is the sum?", lora_path="invoices")
    before = begin_script(engine, sidecar, lambda _: (3, False, 0))
    assert engine.chat("Short.", "What is the sum?")["choices"][0]["message"]["content"]
    eventually(lambda: len(sidecar.reports) > before, description="a report")
    assert not any(report.classes for report in sidecar.reports[before:])


def test_nothing_waits_for_the_device(mode: str, engine: EngineProcess, waits: Path) -> None:
    """After all other tests of this engine."""
    if mode != "overlapped":
        pytest.skip("the list is made where lengths are not on the host")
    assert set(json.loads(waits.read_text())) <= WAITS.keys()


def test_the_shim_keeps_the_contract(tmp_path: Path) -> None:
    """By the same check that authors of other shims run."""
    address = f"unix:{tmp_path}/check.sock"
    lines: list[str] = []
    variables = {
        "SPECULATION_SIDECAR": address,
        "SPECULATION_REPORT_INTERVAL_MS": "0",
        "SPECULATION_LOOKUP": "1",
        "SPECULATION_GAMMAS": "0,1,3",
    }
    with (
        ThreadPoolExecutor(1) as pool,
        running_engine(tmp_path, EAGLE3, variables) as engine,
    ):
        check = pool.submit(ShimCheck(address, lines.append, 60.0).run)
        while not check.done():
            engine.generate(PROMPTS, LENGTHS)
        assert check.result().lines() == []
    assert any("eagle3+ngram at 3" in line for line in lines)
