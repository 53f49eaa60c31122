"""Prometheus metrics, read off the sessions when somebody asks; a step costs nothing here.

A scrape arrives on the HTTP server's thread, takes a snapshot on the event loop (engine by engine,
so that steering goes on in between) and is written out by the thread.  An engine's series end with
its session and start from zero with its next one, which `rate()` understands.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import controller
from controller.core.types import Arm, RegimeMode
from controller.service.override_book import OverrideBook
from controller.service.session import Session
from controller.service.sessions import SessionRegistry

# A scrape that the event loop does not answer in this time fails, and Prometheus says so.
_SNAPSHOT_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One engine at the time of a scrape; what its fields mean is said by the metrics' help."""

    engine: str
    counters: Mapping[str, float]
    rejected: Mapping[str, int]
    plans: Mapping[str, int]
    epoch: int
    chosen: Arm
    measured_costs: bool
    steering: bool
    measuring: bool
    probe_share: float
    expected_accepted: float
    predicted_step_seconds: float
    update_stride: int
    collecting: bool
    draft_version: int
    training_rounds: Mapping[str, int]


# Counter name -> (field of Tally, help).
_COUNTERS = {
    "speculation_reports": ("reports", "Step reports that were used."),
    "speculation_dropped_reports": (
        "dropped",
        "Step reports that the engine's side dropped because its socket was full.",
    ),
    "speculation_unsteered_steps": (
        "unsteered",
        "Reported steps that ran without a valid lease (grace period or safe default).",
    ),
    "speculation_eager_steps": (
        "eager",
        "Reported steps that ran without a graph, in an engine that has graphs.",
    ),
    "speculation_drafter_updates": ("updates", "Online updates of the drafter that have landed."),
    "speculation_step_seconds": ("step_seconds", "Wall-clock seconds of the reported steps."),
    "speculation_draft_tokens": ("drafted_tokens", "Draft tokens verified."),
    "speculation_accepted_tokens": (
        "accepted_tokens",
        "Draft tokens accepted (bonus tokens excluded).",
    ),
    "speculation_generated_tokens": (
        "generated_tokens",
        "Tokens gained: accepted draft tokens and one bonus token per sequence and step.",
    ),
}

# Gauge name -> (field of EngineSample, help).
_GAUGES = {
    "speculation_plan_epoch": ("epoch", "Epoch of the newest plan."),
    "speculation_profiled": (
        "measured_costs",
        "1 while costs come from a profile, 0 while they come from the prior.",
    ),
    "speculation_steering": ("steering", "1 while the engine's stream is open."),
    "speculation_measuring": ("measuring", "1 while the engine is being measured."),
    "speculation_probe_share": ("probe_share", "Share of step time that probing has cost so far."),
    "speculation_expected_accepted_tokens": (
        "expected_accepted",
        "Draft tokens that the planned choice should get accepted, per sequence and step.",
    ),
    "speculation_predicted_step_seconds": (
        "predicted_step_seconds",
        "Seconds that a step of the planned choice should take at the last reported batch size.",
    ),
    "speculation_update_stride": (
        "update_stride",
        "Rounds between two online updates of the drafter, as planned (0: none).",
    ),
    "speculation_collecting": ("collecting", "1 while training signals are to be kept."),
    "speculation_draft_version": (
        "draft_version",
        "Version of the drafter that the last reported step was served by (0: as loaded).",
    ),
}


def sample(session: Session) -> EngineSample:
    """The session's numbers now; choice and predictions are those for its last batch size."""
    tally, last = session.tally, session.last_report
    explanation = session.core.explain(last.batch_size if last else 1)
    chosen = session.plan.row_for(explanation.batch_size).arm
    value = next(value for value in explanation.arms if value.arm == chosen)
    return EngineSample(
        engine=session.engine_id,
        counters={name: getattr(tally, field) for name, (field, _) in _COUNTERS.items()},
        rejected=dict(tally.rejected),
        plans={reason.value: count for reason, count in tally.plans.items()},
        epoch=session.plan.epoch,
        chosen=chosen,
        measured_costs=bool(explanation.profile_id),
        steering=session.stream is not None and session.listeners > 0,
        measuring=session.measurement is not None,
        probe_share=explanation.probe_share,
        expected_accepted=value.expected_accepted,
        predicted_step_seconds=value.step_seconds,
        update_stride=session.plan.regime.stride,
        collecting=session.plan.regime.mode is RegimeMode.COLLECT,
        draft_version=last.draft_version if last else 0,
        training_rounds=dict(tally.rounds),
    )


class SessionCollector(Collector):
    """All engines' samples as metric families."""

    def __init__(
        self, registry: SessionRegistry, book: OverrideBook, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._registry = registry
        self._book = book
        self._loop = loop

    async def _snapshot(self) -> list[EngineSample]:
        samples = []
        for session in self._registry:
            samples.append(sample(session))
            await asyncio.sleep(0)
        return samples

    def collect(self) -> Iterator[Metric]:
        """Called by the HTTP server's thread, once per scrape."""
        snapshot = asyncio.run_coroutine_threadsafe(self._snapshot(), self._loop)
        samples = snapshot.result(_SNAPSHOT_SECONDS_MAX)
        yield InfoMetricFamily(
            "speculation_controller_build",
            "Version of the sidecar.",
            {"version": controller.__version__},
        )
        engines = GaugeMetricFamily(
            "speculation_engines",
            "Introduced engines, by where their costs come from.",
            labels=["costs"],
        )
        engines.add_metric(["measured"], sum(s.measured_costs for s in samples))
        engines.add_metric(["prior"], sum(not s.measured_costs for s in samples))
        yield engines
        yield GaugeMetricFamily(
            "speculation_overrides", "Overrides in force here.", len(self._book.active())
        )
        yield GaugeMetricFamily(
            "speculation_store_ok",
            "1 while the store of overrides can be read and written.",
            float(self._book.health.ok),
        )
        yield from _counters(samples)
        yield from _gauges(samples)


def _counters(samples: list[EngineSample]) -> Iterator[Metric]:
    for name, (_, text) in _COUNTERS.items():
        family = CounterMetricFamily(name, text, labels=["engine"])
        for s in samples:
            family.add_metric([s.engine], s.counters[name])
        yield family
    rejected = CounterMetricFamily(
        "speculation_rejected_reports",
        "Step reports that were refused, by status code.",
        labels=["engine", "code"],
    )
    plans = CounterMetricFamily(
        "speculation_plans", "Plans made, by reason.", labels=["engine", "reason"]
    )
    rounds = CounterMetricFamily(
        "speculation_training_rounds",
        "Rounds of training beside the engine that have ended, by outcome.",
        labels=["engine", "outcome"],
    )
    for s in samples:
        for outcome, count in s.training_rounds.items():
            rounds.add_metric([s.engine, outcome], count)
        for code, count in s.rejected.items():
            rejected.add_metric([s.engine, code], count)
        for reason, count in s.plans.items():
            plans.add_metric([s.engine, reason], count)
    yield rejected
    yield plans
    yield rounds


def _gauges(samples: list[EngineSample]) -> Iterator[Metric]:
    gamma = GaugeMetricFamily(
        "speculation_gamma",
        "Draft length planned for the last reported batch size (0: plain decoding).",
        labels=["engine", "drafter"],
    )
    for s in samples:
        gamma.add_metric([s.engine, s.chosen.drafter], s.chosen.gamma)
    yield gamma
    for name, (field, text) in _GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=["engine"])
        for s in samples:
            family.add_metric([s.engine], float(getattr(s, field)))
        yield family


class MetricsServer:
    """`/metrics` over HTTP, on a thread of its own.  Raises OSError when the port is taken."""

    def __init__(
        self,
        registry: SessionRegistry,
        book: OverrideBook,
        loop: asyncio.AbstractEventLoop,
        host: str,
        port: int,
    ) -> None:
        metrics = CollectorRegistry()
        metrics.register(SessionCollector(registry, book, loop))
        ProcessCollector(registry=metrics)
        PlatformCollector(registry=metrics)
        self._server, self._thread = start_http_server(port, host, metrics)

    def close(self) -> None:
        """Stops serving; waits for the scrape under way.  Not to be called on the event loop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
