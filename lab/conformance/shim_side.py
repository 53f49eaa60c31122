"""Plays a sidecar for an engine that is kept busy: every arm, a probe, a lease that runs out."""

import time
from collections.abc import Callable, Iterator

from controller.core.errors import InvalidEngineError
from controller.wire.engines import engine_from_proto
from lab.conformance.rules import Findings, check_reports
from lab.harness.scripted_sidecar import ScriptedSidecar
from speculation.v1.engine_pb2 import EngineSpec, StepReport
from speculation.v1.plan_pb2 import REASON_EXPLOIT, MixtureRule, Plan, PlanRow, Probe
from speculation.v1.service_pb2 import SteerRequest, SteerResponse

# Steps under each plan, and how long they may take.
_STEPS = 12
_PROBE_STEPS = 3
_LEASE_MS = 60_000
_SHORT_LEASE_MS = 200


class ShimCheck:
    """Serves one engine.  say: prints a line of progress for every part."""

    def __init__(self, address: str, say: Callable[[str], object], wait_seconds: float) -> None:
        self._server = ScriptedSidecar(address)
        self._say, self._wait = say, wait_seconds
        self._plans: dict[int, Plan] = {}
        self._server.first_plan = lambda: self._plan(self._safe_arm())
        self._server.answer = self._acknowledge
        self._received_reports = 0

    def run(self) -> Findings:
        """Returns the rules that the engine's shim broke.  Raises TimeoutError if none comes."""
        with self._server as server:
            self._say("waiting for an engine to introduce itself")
            self._wait_until(lambda: bool(server.introductions), "an introduction")
            engine = server.introductions[-1]
            self._say(f"{engine.engine_id}: {len(self._arms(engine))} arms; keep it busy")
            for drafter, gamma in self._arms(engine):
                self._run_plan(self._plan((drafter, gamma)), f"{drafter} at {gamma}")
            probed = self._arms(engine)[-1]
            self._run_plan(self._plan(self._safe_arm(), probe=probed), "a probe")
            self._let_lapse()
            findings = check_reports(engine, self._plans, server.reports)
            check_introduction(findings, engine)
            self._check_arms(findings, engine)
            return findings

    def _arms(self, engine: EngineSpec) -> list[tuple[str, int]]:
        drafters = {drafter.name: drafter.gammas for drafter in engine.drafters}
        # A loss without draft lengths covers all lengths of the drafter above 0.
        unavailable_arms = {
            (loss.drafter, gamma)
            for loss in engine.lost
            for gamma in loss.gammas or filter(None, drafters.get(loss.drafter, ()))
        }
        return [
            (drafter.name, gamma)
            for drafter in engine.drafters
            for gamma in drafter.gammas
            if (drafter.name, gamma) not in unavailable_arms
            and all(limit.gamma != gamma for limit in drafter.batch_limits)
        ]

    def _safe_arm(self) -> tuple[str, int]:
        engine = self._server.introductions[-1]
        return engine.drafters[0].name, engine.safe_gamma or engine.drafters[0].gammas[0]

    def _plan(
        self, arm: tuple[str, int], lease_ms: int = _LEASE_MS, probe: tuple[str, int] | None = None
    ) -> Plan:
        engine = self._server.introductions[-1]
        epoch = len(self._plans) + 1
        row = PlanRow(
            max_batch_size=engine.max_batch_size,
            drafter=arm[0],
            gamma=arm[1],
            reason=REASON_EXPLOIT,
        )
        if probe is not None:
            row.probe.CopyFrom(
                Probe(probe_id=epoch, drafter=probe[0], gamma=probe[1], steps=_PROBE_STEPS)
            )
        plan = Plan(
            epoch=epoch, rows=[row], lease_ms=lease_ms, reason=REASON_EXPLOIT,
            rules=_rules(engine),
        )  # fmt: skip
        self._plans[epoch] = plan
        return plan

    def _acknowledge(self, request: SteerRequest) -> SteerResponse:
        self._received_reports += len(request.reports)
        response = SteerResponse()
        response.received_so_far.reports = self._received_reports
        return response

    def _run_plan(self, plan: Plan, description: str) -> None:
        self._say(description)
        self._server.push(plan)
        self._wait_until(
            lambda: self._reports_of(plan.epoch) >= _STEPS, f"{_STEPS} steps of {description}"
        )

    def _reports_of(self, epoch: int) -> int:
        return sum(report.plan_epoch == epoch for report in self._server.reports)

    def _let_lapse(self) -> None:
        self._say("a lease that runs out")
        self._server.push(self._plan(self._safe_arm(), _SHORT_LEASE_MS))

        def unsteered(reports: list[StepReport]) -> bool:
            return any(report.flags.unsteered for report in reports[-_STEPS:])

        self._wait_until(lambda: unsteered(self._server.reports), "a step without a valid lease")

    def _check_arms(self, findings: Findings, engine: EngineSpec) -> None:
        executed_arms = {
            (report.drafter if report.gamma else "", report.gamma)
            for report in self._server.reports
        }
        for drafter, gamma in self._arms(engine):
            findings.expect(
                (drafter if gamma else "", gamma) in executed_arms,
                "every arm that was asked for has run",
                f"{drafter} at {gamma}",
            )
        probes = [report.probe_id for report in self._server.reports if report.probe_id]
        findings.expect(
            len(probes) == _PROBE_STEPS,
            "the steps of a probe are reported with its id",
            f"{len(probes)} of {_PROBE_STEPS}",
        )

    def _wait_until(self, condition: Callable[[], bool], description: str) -> None:
        deadline = time.monotonic() + self._wait
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{description} did not come within {self._wait:g} s")
            time.sleep(0.02)


def check_introduction(findings: Findings, engine: EngineSpec) -> None:
    """Notes what a sidecar would refuse an introduction for."""
    try:
        engine_from_proto(engine)
    except InvalidEngineError as error:
        findings.expect(holds=False, rule="a sidecar takes the introduction", location=str(error))


def _rules(engine: EngineSpec) -> Iterator[MixtureRule]:
    for drafter in engine.drafters:
        if drafter.HasField("mixture"):
            for gamma in drafter.gammas:
                if gamma:
                    yield MixtureRule(
                        drafter=drafter.name, gamma=gamma, main_expected=1.0, least_match=2,
                        free_expected=[0.8, 1.2, 1.6, 2.0], ratio_weight=0.1,
                    )  # fmt: skip
