"""Every method of vLLM with a small model, another draft length in every plan.

All engines run one after the other in one process; what they answered and reported is then looked
at by each test.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.conformance.rules import check_reports
from lab.harness.scripted_sidecar import scripted_sidecar
from speculation.v1.engine_pb2 import EngineSpec, StepReport
from speculation.v1.plan_pb2 import Plan
from tests.support.engine import TARGET
from tests.support.reported_counts import count_reports
from tests.support.vllm_engine import (
    MTP_TARGET,
    dflash,
    draft_model,
    eagle3,
    mtp,
    ngram,
    run_job,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 1, 3, 5, 7)
# The last request that is compared with plain decoding must not be drafted for.
UNDRAFTED = 7
# Regular text, so that a draft reaches past the end; a grammar of which drafts know nothing.
ENDS: list[dict[str, Any]] = [
    {"new_tokens": 1}, {"new_tokens": 3}, {"new_tokens": 3}, {"new_tokens": 40, "stops": [17]},
    {"new_tokens": 40, "regex": "(ab|c|[0-9]{3}){4,9}x"}, {"new_tokens": 24, "regex": "[a-f]{30}"},
]  # fmt: skip
# vLLM's replacement of Triton's kernels does not survive numba: the lookup comes last.
METHODS = (
    "eagle3", "eagle3, overlapped", "mtp", "mtp, overlapped", "draft_model", "dflash",
    "dflash, overlapped", "ngram",
)  # fmt: skip


def target_of(name: str) -> str:
    return str(MTP_TARGET if name.startswith("mtp") else TARGET)


def random_lengths() -> Iterator[int]:
    """Draft lengths in an order drawn with a seed.

    Each length comes once before any comes again: a busy machine takes up few of the plans.
    """
    drawn = random.Random(7)
    while True:
        yield from drawn.sample(GAMMAS, len(GAMMAS))


@dataclass(frozen=True)
class Played:
    """What one engine has said of itself, answered and reported."""

    spec: EngineSpec
    answer: dict[str, Any]
    reports: list[StepReport]
    plans: dict[int, Plan]

    def total(self, measure: Any) -> int:
        return sum(map(measure, self.reports))


@pytest.fixture(scope="module")
def all_played(
    prompts: list[list[int]], draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Played]]:
    folder = tmp_path_factory.mktemp("methods")
    speculative_configs = {
        "eagle3": eagle3(draft), "mtp": mtp(), "dflash": dflash(), "draft_model": draft_model(),
        "ngram": ngram(),
    }  # fmt: skip
    engines = [
        {
            "name": name,
            "overlap": "overlapped" in name,
            "arguments": {
                "model": target_of(name),
                "speculative_config": speculative_configs[name.split(",")[0]],
                "skip_tokenizer_init": False,  # for grammars
            },
        }
        for name in METHODS
    ]
    requests: list[dict[str, Any]] = [
        {"prompt": prompt, "new_tokens": 64 - 5 * place} for place, prompt in enumerate(prompts)
    ]
    requests[UNDRAFTED]["extra"] = {"speculation": False}
    lengths = random_lengths()
    with scripted_sidecar(folder) as sidecar:
        sidecar.script = lambda _: (next(lengths), False)

        def all_came(answer: Mapping[str, Any]) -> bool:
            session = f"session-{len(sidecar.introductions)}"
            came = sum(len(r.reports) for r in list(sidecar.requests) if r.session_id == session)
            return bool(came == answer["status"]["reports_sent"])

        results = run_job(
            folder,
            engines,
            requests,
            sidecar.variables | {"SPECULATION_GAMMAS": ",".join(map(str, GAMMAS))},
            [{"prompt": prompts[0]} | end for end in ENDS],
            all_came,
        )
        by_session: dict[str, list[StepReport]] = {}
        for request in sidecar.requests:
            by_session.setdefault(request.session_id, []).extend(request.reports)
        assert len(sidecar.introductions) == len(METHODS)
        yield {
            name: Played(spec, results[name], by_session[f"session-{place}"], sidecar.plans)
            for place, (name, spec) in enumerate(
                zip(METHODS, sidecar.introductions, strict=True), start=1
            )
        }


@pytest.fixture(params=METHODS)
def played(all_played: dict[str, Played], request: pytest.FixtureRequest) -> Played:
    return all_played[request.param]


def test_every_token_is_plain_decodings(
    played: Played, decoded_plainly: dict[str, list[list[int]]]
) -> None:
    plain = decoded_plainly[played.spec.fingerprint.target_model]
    answered = played.answer["tokens"][: len(plain)]
    assert answered == [whole[: len(mine)] for whole, mine in zip(plain, answered, strict=True)]


def test_draft_lengths_change_and_the_reports_keep_the_contract(played: Played) -> None:
    assert played.answer["status"]["reports_dropped"] == 0
    assert played.answer["status"]["reports_invalid"] == 0
    assert played.answer["status"]["lost"] == []
    assert check_reports(played.spec, played.plans, played.reports).lines() == []
    # How many plans arrive during the play depends on the machine.
    assert len({report.gamma for report in played.reports}) > 1
    assert any(report.flags.mixed_choice for report in played.reports)


def test_reports_agree_with_vllms_own_counters(played: Played) -> None:
    metrics = {
        name.removeprefix("vllm:spec_decode_num_"): value
        for name, value in played.answer["metrics"].items()
    }
    ours = count_reports(played.reports)
    assert ours.accepted_tokens == metrics["accepted_tokens"]
    assert ours.drafted_tokens == metrics["draft_tokens"]
    # With async scheduling vLLM counts a draft of which a grammar has left nothing.
    emptied = metrics["drafts"] - ours.drafts
    assert emptied >= 0
    assert emptied == 0 or played.spec.capabilities.overlap_steps
    empty = played.total(
        lambda r: sum(
            sum(group.accepted_counts)
            for group in r.groups
            if r.gamma and group.drafter and group.gamma == 0 and not group.ended
        )
    )
    assert emptied <= empty


def test_delivered_tokens_are_vllms_generation_tokens_but_for_first_ones(played: Played) -> None:
    answers = played.answer["tokens"]
    ours = count_reports(played.reports)
    assert ours.delivered_tokens == sum(len(tokens) - 1 for tokens in answers)
    assert ours.delivered_tokens == played.answer["metrics"]["vllm:generation_tokens"] - len(
        answers
    )
    # What was verified past the ends is counted as well.
    assert 0 <= ours.generated_tokens - ours.delivered_tokens <= max(GAMMAS) * len(answers)


def test_tokens_verified_past_the_ends_are_counted_as_generated(
    all_played: dict[str, Played],
) -> None:
    # An engine that accepts few drafts may end every request without such a token.
    counts = [count_reports(played.reports) for played in all_played.values()]
    delivered = sum(each.delivered_tokens or 0 for each in counts)
    assert 0 < delivered < sum(each.generated_tokens for each in counts)


def test_a_request_that_must_not_be_drafted_for_is_a_group_without_drafts(
    played: Played,
) -> None:
    its_tokens = len(played.answer["tokens"][UNDRAFTED])
    undrafted = [group for report in played.reports for group in report.groups if not group.drafter]
    assert {(group.gamma, tuple(group.accepted_counts)) for group in undrafted} == {(0, (1,))}
    # One token each step, but for the first, which ends its prompt.
    assert len(undrafted) == its_tokens - 1


def test_it_says_which_engine_it_is(
    played: Played, draft: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["played"]
    mark, drafter = played.spec.fingerprint, played.spec.drafters[0]
    assert (mark.engine, mark.target_model, mark.dtype) == ("vllm", target_of(name), "float32")
    assert drafter.name == name.split(",")[0]
    assert tuple(drafter.gammas) == GAMMAS
    assert played.spec.capabilities.draft_lag == 1
    assert played.spec.capabilities.overlap_steps == ("overlapped" in name)
    assert played.answer["scheduler"] == (
        "SteeredAsyncScheduler" if "overlapped" in name else "SteeredScheduler"
    )
    if drafter.name == "eagle3":
        assert drafter.model == str(draft)
