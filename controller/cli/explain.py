"""Implements `controller engines` and `controller explain`, which ask a running sidecar.

`explain` has three levels.  The line and the paragraph are here; the numbers are in
`explain_numbers`.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.completion import engine_ids
from controller.cli.connection import DEFAULT_ADDRESS, UINT32_MAX, Address, open_connection
from controller.cli.explain_numbers import (
    count_text,
    health_text,
    lost_text,
    print_numbers,
    row_for,
    store_text,
    warnings_text,
)
from controller.cli.fleet import (
    FilterOption,
    FleetOption,
    read_fleet,
    require_fleet,
    show_fleet,
)
from controller.cli.output import (
    TABLES,
    Column,
    Listing,
    Output,
    OutputOption,
    plain_values,
    print_line,
    print_list,
    print_result,
    print_wrapped,
)
from controller.wire.override_text import held_override_text, reason_text, regime_text

if TYPE_CHECKING:
    from speculation.v1 import service_pb2

_ANSWER_SECONDS_MAX = 5.0
# An estimate with fewer observations is called weak.
_WEAK_EVIDENCE = 50
_REASONS = {
    "exploit": "this is the best choice by the current estimates",
    "probe": "this remains the choice while a few steps try another one",
    "hold": "another choice is better, but not by enough to pay for the switch",
    "profile-missing": "this is the best choice by assumed step times",
    "profiling": "a profile measurement chooses the draft length",
    "lease": "nothing has changed since the last plan",
    "override": "an override or a bound has excluded a better choice",
}


def engines(
    output: OutputOption = Output.TABLE,
    fleet: FleetOption = False,
    words: FilterOption = "",
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Lists the engines of this sidecar, or, with --fleet, of all sidecars."""
    from controller.client.paging import collect_request_pages
    from speculation.v1 import service_pb2, service_pb2_grpc

    require_fleet(fleet=fleet, filter_text=words)
    with open_connection(address) as channel:
        if fleet:
            show_fleet(read_fleet(channel, words), output)
            return
        list_engines = service_pb2_grpc.InspectionServiceStub(channel).ListEngines
        answer = collect_request_pages(
            partial(list_engines, timeout=_ANSWER_SECONDS_MAX), service_pb2.ListEnginesRequest()
        )
    print_list(_ENGINES, answer.engines, output, "no engine has introduced itself")
    if output not in TABLES:
        return
    for status in answer.engines:
        for line in lost_text(status.engine.lost).splitlines():
            print_line(f"{status.engine.engine_id}: {line}")
    for line in health_text(answer.sidecar.services).splitlines():
        print_line(line)


def explain(
    engine: Annotated[
        str,
        typer.Argument(
            help="Engine id, as `controller engines` lists it.", autocompletion=engine_ids
        ),
    ],
    batch_size: Annotated[
        int,
        typer.Option(
            min=0, max=UINT32_MAX, help="Batch size to explain; 0: the last reported one."
        ),
    ] = 0,
    short: Annotated[bool, typer.Option("--short", help="Print one line.")] = False,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="Print every choice and every estimate.")
    ] = False,
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Explains in a paragraph why an engine runs its present draft length.

    --short prints one line, --numbers (or -o wide) all numbers. JSON and YAML always have all
    numbers.
    """
    from speculation.v1 import service_pb2, service_pb2_grpc

    if short and numbers:
        raise typer.BadParameter("--short and --numbers contradict each other")
    with open_connection(address) as channel:
        answer = service_pb2_grpc.InspectionServiceStub(channel).Explain(
            service_pb2.ExplainRequest(engine_id=engine, batch_size=batch_size),
            timeout=_ANSWER_SECONDS_MAX,
        )

    def print_text() -> None:
        if short:
            print_wrapped(line_text(answer))
        elif numbers or output is Output.WIDE:
            print_numbers(answer, wide=output is Output.WIDE)
        else:
            print_wrapped(paragraph_text(answer))

    print_result("Explanation", plain_values(answer), output, [answer.engine_id], print_text)


def _last_batch_size(status: "service_pb2.EngineStatus") -> int:
    return status.last_report.batch_size if status.HasField("last_report") else 0


def _plan_text(status: "service_pb2.EngineStatus") -> str:
    row = row_for(status.plan, _last_batch_size(status) or 1)
    return f"{row.drafter} {row.gamma}"


def _last_report_text(status: "service_pb2.EngineStatus") -> str:
    return f"{status.seconds_since_last_report:.1f} s ago" if _last_batch_size(status) else "never"


_ENGINES: "Listing[service_pb2.EngineStatus]" = Listing(
    "EngineStatusList",
    lambda status: status.engine.engine_id,
    (
        Column("engine", lambda status: status.engine.engine_id),
        Column("profile", lambda status: status.profile_id or "none (prior)", priority=3),
        Column("B", lambda status: str(_last_batch_size(status) or "-"), is_right_aligned=True),
        Column("gamma", _plan_text),
        Column("reason", lambda status: reason_text(status.plan), priority=1),
        Column("reports", lambda status: str(status.reports), is_right_aligned=True, priority=4),
        Column(
            "rejected",
            lambda status: str(status.rejected_reports),
            is_right_aligned=True,
            priority=5,
        ),
        Column(
            "dropped", lambda status: str(status.dropped_reports), is_right_aligned=True, priority=5
        ),
        Column("last report", _last_report_text, is_right_aligned=True, priority=2),
    ),
    plain_values,
    lambda status: status.unavailable,
)


def line_text(answer: "service_pb2.ExplainResponse") -> str:
    """Returns one line: what the engine runs, the expected throughput, and the reason."""
    arm = _chosen_arm(answer)
    if arm is None:
        return f"{answer.engine_id}: no choice has been made yet"
    return (
        f"{answer.engine_id} at B = {answer.batch_size}: {_arm_text(arm.drafter, arm.gamma)}, "
        f"{arm.tokens_per_second:.0f} tokens/s expected{_comparison_text(answer, arm)}; "
        f"{_row_reason_text(answer)}"
    )


def paragraph_text(answer: "service_pb2.ExplainResponse") -> str:
    """Returns the same in full sentences, followed by a line for each problem."""
    arm = _chosen_arm(answer)
    sentences = [f"No choice has been made yet for {answer.engine_id}."]
    if arm is not None:
        sentences = [
            *_choice_sentences(answer, arm),
            *_evidence_sentences(answer, arm),
            *_limit_sentences(answer),
        ]
    troubles = lost_text(answer.lost) + warnings_text(answer.warnings)
    troubles += health_text(answer.services) + store_text(answer.store)
    hint = f"All numbers: controller explain {answer.engine_id} --numbers"
    return f"{' '.join(sentences)}\n{troubles}{hint}"


def _choice_sentences(
    answer: "service_pb2.ExplainResponse", arm: "service_pb2.ArmExplanation"
) -> Iterator[str]:
    size = f"With {count_text(answer.batch_size, 'sequence', 'sequences')} in its batch"
    tokens = count_text(arm.gamma, "token", "tokens")
    if arm.gamma:
        sentence = (
            f"{size}, {answer.engine_id} drafts {tokens} per step with {arm.drafter}: "
            f"{_row_reason_text(answer)}. About {arm.expected_accepted:.2f} of them should be "
            "accepted, so a "
            f"step of {arm.step_seconds * 1e3:.1f} ms should give every sequence "
            f"{1 + arm.expected_accepted:.2f} tokens"
        )
    else:
        sentence = (
            f"{size}, {answer.engine_id} decodes without speculation: {_row_reason_text(answer)}. "
            "A step "
            f"should take {arm.step_seconds * 1e3:.1f} ms and give every sequence one token"
        )
    yield (
        sentence + f", {arm.tokens_per_second:.0f} tokens/s in all{_comparison_text(answer, arm)}."
    )
    best = _best_allowed_arm(answer)
    if best is not None and best.tokens_per_second > arm.tokens_per_second:
        yield (
            f"The highest estimate is that of {_arm_text(best.drafter, best.gamma)}, "
            f"{best.tokens_per_second:.0f} tokens/s."
        )
    elif answer.runner_up_drafter:
        runner_up = _arm_text(answer.runner_up_drafter, answer.runner_up_gamma)
        yield f"The second best choice, {runner_up}, is {answer.margin:.1%} behind the best."


def _evidence_sentences(
    answer: "service_pb2.ExplainResponse", arm: "service_pb2.ArmExplanation"
) -> Iterator[str]:
    if answer.policy not in {"", "goodput"}:
        yield f"The decision rule is {answer.policy}, not the default (goodput)."
    if answer.profile_id:
        yield f"Step times come from profile {answer.profile_id}, corrected by live steps."
    else:
        yield (
            f"No profile matches this engine, so step times start from a "
            f"{answer.prior or 'generic'} prior; `controller profile` measures them."
        )
    exposures = [
        estimate.exposures
        for estimate in answer.positions
        if estimate.drafter == arm.drafter and not estimate.label and estimate.position <= arm.gamma
    ]
    if exposures and min(exposures) < _WEAK_EVIDENCE:
        yield (
            f"The acceptance of draft position {arm.gamma} is uncertain: it has "
            f"{min(exposures):.0f} recent observations."
        )
    if answer.probes:
        yield f"Probing other choices has cost {answer.probe_share:.2%} of the step time so far."


def _limit_sentences(answer: "service_pb2.ExplainResponse") -> Iterator[str]:
    effective = [
        entry for entry in answer.overrides if entry.override.override_id in answer.limits.overrides
    ]
    for entry in effective:
        name = entry.override.override_id
        yield f"Override {name} limits the choice ({held_override_text(entry)})."
    if ineffective_count := len(answer.overrides) - len(effective):
        yield f"Overrides that do not apply at this batch size: {ineffective_count}."
    if (regime := regime_text(answer.plan.regime)) not in {"off", "unspecified"}:
        yield f"Online updates of the drafter: {regime}."
    if answer.HasField("bound"):
        bound = answer.bound
        state = "is met" if bound.expected_seconds <= bound.seconds else "is not met"
        yield (
            f"The bound of {bound.seconds * 1e3:g} ms per output token {state}: "
            f"{bound.expected_seconds * 1e3:.2f} ms are expected."
        )


def _chosen_arm(answer: "service_pb2.ExplainResponse") -> "service_pb2.ArmExplanation | None":
    return next((arm for arm in answer.arms if arm.chosen), None)


def _arm_text(drafter: str, gamma: int) -> str:
    if not gamma:
        return f"no speculation ({drafter} off)"
    return f"{drafter} with {count_text(gamma, 'draft token', 'draft tokens')}"


def _comparison_text(
    answer: "service_pb2.ExplainResponse", arm: "service_pb2.ArmExplanation"
) -> str:
    """Compares an arm with plain decoding, or plain decoding with the best draft length."""
    if arm.gamma:
        rates = [other_arm.tokens_per_second for other_arm in answer.arms if other_arm.gamma == 0]
        reference = "those of plain decoding"
    else:
        rates = [
            other_arm.tokens_per_second
            for other_arm in answer.arms
            if other_arm.gamma and not other_arm.forbidden
        ]
        reference = "those of the best draft length"
    best = max(rates, default=0.0)
    return f", {arm.tokens_per_second / best:.2f} times {reference}" if best > 0 else ""


def _row_reason_text(answer: "service_pb2.ExplainResponse") -> str:
    """Returns the reason of the plan's row for this batch size."""
    reason = reason_text(row_for(answer.plan, answer.batch_size))
    if reason == "exploit" and not answer.profile_id and answer.prior:
        # A row does not say that its costs are assumed, or that longer drafts are discounted.
        arm, best = _chosen_arm(answer), _best_allowed_arm(answer)
        if arm is None or best is None or best.tokens_per_second <= arm.tokens_per_second:
            return _REASONS["profile-missing"]
        return "without a profile it starts with short drafts until longer ones surely pay off"
    return _REASONS.get(reason, f"the reason is {reason}")


def _best_allowed_arm(
    answer: "service_pb2.ExplainResponse",
) -> "service_pb2.ArmExplanation | None":
    """Returns the allowed arm with the highest estimated tokens per second."""
    allowed = (arm for arm in answer.arms if not arm.forbidden)
    return max(allowed, key=lambda arm: arm.tokens_per_second, default=None)
