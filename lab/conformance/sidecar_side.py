"""Plays an engine of three drafters and a mixture against a running sidecar."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import grpc

from lab.conformance.rules import Findings, check_plan
from lab.harness.sidecar import find_row
from speculation.v1.engine_pb2 import (
    DRAFTER_KIND_DFLASH,
    DRAFTER_KIND_MIXTURE,
    DRAFTER_KIND_MTP,
    DRAFTER_KIND_NGRAM,
    Capabilities,
    Drafter,
    EngineSpec,
    Fingerprint,
    Mixture,
    ProposalCounts,
    RowGroup,
    StepReport,
)
from speculation.v1.plan_pb2 import Plan
from speculation.v1.service_pb2 import IntroduceRequest, SteerRequest, SteerResponse
from speculation.v1.service_pb2_grpc import SpeculationServiceStub

BATCH = 4
_ANSWER_SECONDS = 10.0
_REPORTS_A_MESSAGE = 32


def engine_spec(engine_id: str) -> EngineSpec:
    """Describes an engine without a profile."""
    gammas = [0, 1, 3, 5]
    return EngineSpec(
        engine_id=engine_id,
        fingerprint=Fingerprint(target_model="conformance", engine="conformance", device="none"),
        drafters=[
            Drafter(name="mtp", kind=DRAFTER_KIND_MTP, gammas=gammas),
            Drafter(name="dflash", kind=DRAFTER_KIND_DFLASH, gammas=gammas[1:]),
            Drafter(name="ngram", kind=DRAFTER_KIND_NGRAM, gammas=gammas[1:]),
            Drafter(
                name="mtp+ngram",
                kind=DRAFTER_KIND_MIXTURE,
                gammas=gammas[1:],
                mixture=Mixture(main="mtp", free="ngram"),
            ),
        ],
        max_batch_size=8,
        capabilities=Capabilities(can_switch_drafter=True, drafters_follow=True),
    )


class FakeEngine:
    """Runs what its plans ask for, without computing anything, and reports each step."""

    def __init__(self, engine: EngineSpec, seed: int = 1) -> None:
        self.engine = engine
        self._rng = random.Random(seed)
        self._step = 0
        self._probe_steps_left: dict[int, int] = {}

    def step(self, plan: Plan) -> StepReport:
        """Returns the report of a step under a plan."""
        self._step += 1
        row = find_row(plan, BATCH)
        drafter, gamma, probe = row.drafter, row.gamma, 0
        if row.HasField("probe"):
            steps_left = self._probe_steps_left.setdefault(row.probe.probe_id, row.probe.steps)
            if steps_left:
                self._probe_steps_left[row.probe.probe_id] = steps_left - 1
                drafter, gamma, probe = row.probe.drafter, row.probe.gamma, row.probe.probe_id
        accepted = [self._accepted(gamma) for _ in range(BATCH)]
        report = StepReport(
            step=self._step, batch_size=BATCH, kv_tokens=BATCH * 100, drafter=drafter, gamma=gamma,
            accepted_counts=_histogram(accepted, gamma), step_seconds=0.01 + 0.001 * gamma,
            plan_epoch=plan.epoch, probe_id=probe,
        )  # fmt: skip
        if gamma and drafter in {"mtp", "mtp+ngram"}:
            self._add_rows(report, accepted, mixed=drafter == "mtp+ngram")
        return report

    def _accepted(self, gamma: int) -> int:
        n = 0
        while n < gamma and self._rng.random() < 0.7:
            n += 1
        return n

    def _add_rows(self, report: StepReport, accepted: Sequence[int], *, mixed: bool) -> None:
        gamma = report.gamma
        if mixed:
            report.groups.extend(
                RowGroup(drafter=name, gamma=gamma, accepted_counts=_histogram(rows, gamma))
                for name, rows in (("mtp", accepted[:2]), ("ngram", accepted[2:]))
            )
        report.proposals.append(
            ProposalCounts(
                drafter="ngram", match_length=4, accepted_counts=_histogram(accepted[2:], gamma)
            )
        )
        report.proposals.append(ProposalCounts(drafter="ngram", accepted_counts=[2, *[0] * gamma]))


def _histogram(values: Sequence[int], gamma: int) -> list[int]:
    return [sum(value == k for value in values) for k in range(gamma + 1)]


def check_sidecar(address: str, steps: int = 256) -> Findings:
    """Plays an engine; returns the rules that the sidecar broke.  Raises grpc.RpcError."""
    findings = Findings()
    with grpc.insecure_channel(address) as channel:
        stub = SpeculationServiceStub(channel)
        engine = engine_spec(f"conformance-{time.time_ns() % 10**9}")
        request = IntroduceRequest(engine=engine, engine_secret=f"secret of {engine.engine_id}")
        answer = stub.Introduce(request, timeout=_ANSWER_SECONDS)
        findings.expect(bool(answer.session_id), "an introduction opens a session", "Introduce")
        check_plan(findings, engine, answer.plan, 0)
        _play(findings, stub, FakeEngine(engine), answer.session_id, answer.plan, steps)
        _check_refusals(findings, stub, request)
    return findings


def _play(
    findings: Findings, stub: SpeculationServiceStub, engine: FakeEngine, session: str, plan: Plan,
    steps: int,
) -> None:  # fmt: skip
    outgoing: SimpleQueue[SteerRequest | None] = SimpleQueue()

    def messages() -> Iterator[SteerRequest]:
        while (message := outgoing.get()) is not None:
            yield message

    stream = stub.Steer(messages(), timeout=60)
    sent_reports, newest = 0, plan.epoch
    while sent_reports < steps:
        reports = [engine.step(plan) for _ in range(_REPORTS_A_MESSAGE)]
        if sent_reports == 0:
            # This report is invalid. The sidecar must still use the rest of its message.
            reports.append(StepReport(step=10**6, batch_size=1, drafter="mtp"))
        outgoing.put(SteerRequest(session_id=session, reports=reports))
        sent_reports += len(reports)
        for response in _receive_until_acknowledged(stream, sent_reports):
            if response.rejections:
                steps_refused = [rejection.step for rejection in response.rejections]
                findings.expect(
                    steps_refused == [10**6],
                    "an invalid report is refused and the rest of its message is used",
                    f"refused: {steps_refused}",
                )
            if response.HasField("plan"):
                plan = response.plan
                check_plan(findings, engine.engine, plan, newest)
                newest = max(newest, plan.epoch)
    findings.expect(
        newest > 1, "reports lead to new plans", f"epoch {newest} after {sent_reports} reports"
    )
    findings.expect(bool(plan.rules), "an engine with a mixture is sent its rules", "the last plan")
    outgoing.put(None)


def _receive_until_acknowledged(
    stream: Iterator[SteerResponse], sent_reports: int
) -> Iterator[SteerResponse]:
    for response in stream:
        yield response
        if response.received_so_far.reports >= sent_reports:
            return


def _check_refusals(
    findings: Findings, stub: SpeculationServiceStub, valid_request: IntroduceRequest
) -> None:
    invalid_request = IntroduceRequest()
    invalid_request.CopyFrom(valid_request)
    invalid_request.engine.drafters[3].mixture.free = "dflash"
    code = _code_of(lambda: stub.Introduce(invalid_request, timeout=_ANSWER_SECONDS))
    findings.expect(
        code is grpc.StatusCode.INVALID_ARGUMENT,
        "an introduction that contradicts itself is INVALID_ARGUMENT",
        f"a mixture of no lookup: {code}",
    )
    unknown_session_requests = iter([SteerRequest(session_id="no such session")])
    code = _code_of(lambda: list(stub.Steer(unknown_session_requests, timeout=_ANSWER_SECONDS)))
    findings.expect(
        code is grpc.StatusCode.FAILED_PRECONDITION,
        "a session that is unknown is FAILED_PRECONDITION",
        f"Steer: {code}",
    )


def _code_of(call: Callable[[], object]) -> grpc.StatusCode | None:
    try:
        call()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return None
