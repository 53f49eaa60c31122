"""A real Prometheus scrapes a real sidecar that steers an engine over a real link."""

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.service.metrics.family import MetricFamily
from controller.service.metrics.server import ENGINE_FAMILIES
from controller.service.metrics.sidecar import SIDECAR_FAMILIES
from lab.harness.processes import free_port
from tests.support.eventually import eventually
from tests.support.prometheus_server import (
    PATIENCE_SECONDS,
    PrometheusServer,
    find_tool,
    prometheus,
)
from tests.support.redis_server import RedisServer
from tests.support.sidecar_process import SidecarProcess, controller, sidecar_process
from tests.system.monitoring.selectors import (
    Selector,
    compared,
    dashboard_queries,
    panel_targets,
    selectors,
)
from tests.system.monitoring.steered_engine import (
    BATCH_SIZE,
    ENGINE,
    SAFE_GAMMA,
    SteeredEngine,
    steered_engine,
)

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "deploy" / "monitoring" / "dashboard.json"
REFERENCE = ROOT / "docs" / "metrics.md"
AUTOSCALING = ROOT / "docs" / "autoscaling.md"


@dataclass(frozen=True)
class Stage:
    """Everything, running; the engine rests between the steps that a test asks for."""

    engine: SteeredEngine
    prometheus: PrometheusServer
    metrics_url: str

    def scrape(self) -> str:
        with urllib.request.urlopen(self.metrics_url, timeout=30) as answer:
            return str(answer.read().decode())

    def settled(self) -> None:
        """Returns once Prometheus has scraped everything that was reported."""
        eventually(
            lambda: self.number("speculation_reports_total") == self.engine.steps,
            timeout_seconds=PATIENCE_SECONDS,
            description=f"{self.engine.steps} reports in Prometheus",
        )

    def answered(self, query: str) -> list[dict[str, Any]]:
        """The samples of a query; a rate has none before the second scrape of its series."""
        return eventually(
            lambda: self.prometheus.query(query),
            timeout_seconds=PATIENCE_SECONDS,
            description=f"data: {query}",
        )

    def number(self, name: str, **labels: str) -> float:
        matchers = "".join(f',{label}="{value}"' for label, value in labels.items())
        samples = self.prometheus.query(f'{name}{{engine="{ENGINE}"{matchers}}}')
        return float(samples[0]["value"][1]) if len(samples) == 1 else -1.0


def override(sidecar: SidecarProcess, *words: str) -> None:
    done = controller(
        "override", "set", *words, "--reason", "test", "--ttl", "1h",
        environment={"CONTROLLER_ADDRESS": sidecar.address},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder, port = tmp_path_factory.mktemp("stage"), free_port()
    policy = folder / "policy.yaml"
    policy.write_text("policies:\n  - {name: a, fleet: true, reason: test, at_most: 6}\n")
    with (
        RedisServer(folder / "redis") as redis,
        sidecar_process(
            folder,
            *("--metrics-port", str(port)),
            environment={"CONTROLLER_POLICY": str(policy), "CONTROLLER_REDIS_URL": redis.url},
        ) as sidecar,
        prometheus(folder, port) as server,
        steered_engine(sidecar.address) as engine,
    ):
        override(sidecar, "--engine", ENGINE, "--at-most", "5", "--tpot-max-ms", "500")
        engine.run_until(lambda: engine.drafts and engine.steps >= 400, "400 steps, some drafted")
        engine.run(5, unsteered=True)
        engine.run(20)
        prepared_stage = Stage(engine, server, f"http://127.0.0.1:{port}/metrics")
        prepared_stage.settled()
        yield prepared_stage


def test_prometheus_has_what_the_engine_reported(stage: Stage):
    engine = stage.engine
    assert stage.number("speculation_step_seconds_total") == pytest.approx(engine.seconds)
    assert stage.number("speculation_drafts_total") == engine.drafts
    assert stage.number("speculation_accepted_tokens_total") == engine.accepted
    assert stage.number("speculation_delivered_tokens_total") == engine.delivered
    assert stage.number("speculation_ended_sequence_steps_total") == 0
    assert stage.number("speculation_unsteered_steps_total") == engine.unsteered == 5
    assert stage.number("speculation_lease_losses_total") == 1
    assert stage.number("speculation_fallback") == 0
    assert stage.number("speculation_steering") == 1
    assert stage.number("speculation_dropped_reports_total") == engine.refused
    assert stage.number("speculation_engine_overrides") == 2  # the policy is one of them
    assert stage.prometheus.value("speculation_policy_entries") == 1
    assert stage.prometheus.value("sum(speculation_overrides)") == 1
    assert 3000 < stage.prometheus.value("speculation_override_soonest_end_seconds") <= 3600
    by_position = stage.prometheus.value("sum(speculation_accepted_tokens_per_pos_total)")
    assert by_position == engine.accepted
    assert stage.number("speculation_draft_tokens_total") == engine.drafted
    assert stage.number("speculation_sequence_steps_total") == engine.steps * BATCH_SIZE
    histogram = "speculation_accepted_tokens_per_draft"
    for k in range(max(engine.by_length) + 1):
        at_most = sum(drafts for length, drafts in engine.by_length.items() if length <= k)
        assert stage.number(f"{histogram}_bucket", le=f"{k}.0") == at_most
    assert stage.number(f"{histogram}_bucket", le="+Inf") == engine.drafts
    assert stage.number(f"{histogram}_count") == engine.drafts
    assert stage.number(f"{histogram}_sum") == engine.accepted


def test_ratios_of_the_last_minute_are_those_of_the_counters(stage: Stage):
    """Nothing older than a minute is there yet, or the engine was as it is now."""
    stage.engine.run(100)
    stage.settled()
    engine = stage.engine
    verified = engine.drafted + engine.drafts

    def near(name: str, value: float) -> bool:
        return abs(stage.number(f"speculation_{name}") - value) < 0.1 * value

    eventually(
        lambda: (
            near("acceptance_length", 1 + engine.accepted / engine.drafts)
            and near("draft_acceptance_rate", engine.accepted / engine.drafted)
            and near("accepted_per_verified", (engine.accepted + engine.drafts) / verified)
        ),
        timeout_seconds=PATIENCE_SECONDS,
        description="ratios near those of all steps",
    )


def test_estimates_come_near_what_the_engine_does(stage: Stage):
    """Once the sidecar has learnt this machine, which it does plan by plan."""
    names = [
        f"speculation_{name}_total"
        for name in (
            "plain_seconds", "predicted_seconds", "prediction_error_seconds",
            "accepted_tokens", "expected_accepted_tokens",
        )
    ]  # fmt: skip

    def leg() -> list[float]:
        before = [stage.number(name) for name in names]
        stage.engine.run(100)
        stage.settled()
        return [stage.number(name) - was for name, was in zip(names, before, strict=True)]

    def near() -> bool:
        observed, predicted, error, accepted, expected = leg()
        assert error >= abs(observed - predicted) - 1e-9
        return error < 0.1 * observed and abs(accepted - expected) < 0.2 * expected

    eventually(near, timeout_seconds=PATIENCE_SECONDS, description="predictions come true")
    # At 0.8 a position drafting pays on this machine, and much of it more than one token.
    assert stage.engine.gamma > SAFE_GAMMA
    for instead in ("off", "static"):
        assert stage.number("speculation_estimated_gain_ratio", instead=instead) > 1
        assert stage.number("speculation_estimated_instead_seconds_total", instead=instead) > 0


def test_promtool_finds_nothing_to_mend_in_a_scrape(stage: Stage):
    checked = subprocess.run(
        [find_tool("promtool"), "check", "metrics"],
        input=stage.scrape(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize("family", [*ENGINE_FAMILIES, *SIDECAR_FAMILIES], ids=lambda f: f.name)
def test_every_metric_of_the_reference_is_there_with_its_labels(
    stage: Stage, family: "MetricFamily[object]"
):
    samples = stage.answered(family.sample_name)
    own = {"engine"} if family in ENGINE_FAMILIES else set()
    own |= set(family.labels)
    for sample in samples:
        assert set(sample["metric"]) == {"__name__", "job", "instance"} | own


def labels_there(stage: Stage) -> dict[str, set[str]]:
    """By metric that Prometheus has, the labels of its series."""
    label_names: dict[str, set[str]] = {}
    for series in stage.prometheus.api("series", **{"match[]": '{__name__=~".+"}'}):
        name = series.pop("__name__")
        label_names.setdefault(name, set()).update(series)
    return label_names


def missing(stage: Stage, wanted: set[Selector]) -> set[Selector]:
    """Those whose metric is not there, or has no such label, or no such value of it."""
    there = labels_there(stage)
    return {
        selector
        for selector in wanted
        if not selector.labels <= there.get(selector.name, set())
        or (selector.is_exact and not stage.prometheus.query(selector.text))
    }


def alert_rules(stage: Stage) -> dict[str, str]:
    """Expressions by name, as the server has loaded them."""
    groups = stage.prometheus.api("rules", type="alert")["groups"]
    return {rule["name"]: rule["query"] for group in groups for rule in group["rules"]}


def test_every_metric_and_label_of_the_alerts_exists(stage: Stage):
    wanted = {selector for query in alert_rules(stage).values() for selector in selectors(query)}
    assert len(wanted) > 15
    assert missing(stage, wanted) == set()


def test_what_every_alert_compares_has_data(stage: Stage):
    stage.engine.run(50)
    stage.settled()
    for name, query in alert_rules(stage).items():
        for side in compared(query):
            assert stage.answered(side), f"{name}: {side}"


def test_every_alert_is_evaluated_without_an_error(stage: Stage):
    def evaluated() -> bool:
        groups = stage.prometheus.api("rules", type="alert")["groups"]
        return all(rule["health"] != "unknown" for group in groups for rule in group["rules"])

    eventually(evaluated, timeout_seconds=PATIENCE_SECONDS, description="every rule evaluated")
    for group in stage.prometheus.api("rules", type="alert")["groups"]:
        for rule in group["rules"]:
            assert (rule["name"], rule["health"]) == (rule["name"], "ok"), rule.get("lastError")


def test_a_sidecar_and_an_engine_that_are_well_raise_no_alert(stage: Stage):
    alerts = stage.prometheus.api("alerts")["alerts"]
    # What holds now, and would have to hold for longer, is not one yet.
    assert [alert for alert in alerts if alert["state"] == "firing"] == []


def test_every_metric_and_label_of_the_dashboard_exists(stage: Stage):
    queries = dashboard_queries(json.loads(DASHBOARD.read_text()))
    wanted = {selector for query in queries for selector in selectors(query)}
    assert len(wanted) > 50
    assert missing(stage, wanted) == set()


def test_every_query_of_the_dashboard_is_answered(stage: Stage):
    stage.engine.run(50)
    stage.settled()
    for query, legend in panel_targets(json.loads(DASHBOARD.read_text())):
        # Nothing was refused, so that panel shows nothing.
        refused = "rejected_reports" in query
        samples = stage.prometheus.query(query) if refused else stage.answered(query)
        for sample in samples:
            assert set(re.findall(r"{{(\w+)}}", legend)) <= set(sample["metric"]), query


def test_every_query_of_the_reference_is_answered(stage: Stage):
    stage.engine.run(50)
    stage.settled()
    table = REFERENCE.read_text().partition("| question | query |")[2].partition("## ")[0]
    queries = re.findall(r"\| `(.+)` \|$", table, re.MULTILINE)
    assert len(queries) > 5
    for query in queries:
        assert stage.answered(query), query


def test_every_query_for_autoscalers_is_answered(stage: Stage):
    stage.engine.run(50)
    stage.settled()
    queries = re.findall(r"```promql\n(.*?)```", AUTOSCALING.read_text(), re.DOTALL)
    assert all(stage.answered(query) for query in queries)
    # Over all that the engine has done, instead of what Prometheus has seen of it.
    of_all = [re.sub(r"rate\((\w+)\[5m\]\)", r"\1", query) for query in queries]
    token_seconds, gained = map(stage.prometheus.value, of_all)
    engine = stage.engine
    assert gained == pytest.approx(1 + engine.accepted / (engine.steps * BATCH_SIZE))
    assert token_seconds == pytest.approx(engine.seconds / engine.steps / gained)


def test_every_metric_has_its_place_on_the_dashboard():
    queries = " ".join(dashboard_queries(json.loads(DASHBOARD.read_text())))
    shown = set(re.findall(r"\bspeculation_\w+", queries))
    families: list[MetricFamily[Any]] = [*ENGINE_FAMILIES, *SIDECAR_FAMILIES]
    assert {family.sample_name for family in families} - shown == set()


@pytest.mark.parametrize(
    ("query", "sides"),
    [
        ("a > 1", {"a"}),
        ("abs(a - b) >= 2 * c and on (x) d == 0", {"abs(a - b)", "2 * c", "d"}),
        ("(a < b) unless c", {"a", "b", "c"}),
    ],
)
def test_the_sides_of_comparisons_are_found(query: str, sides: set[str]):
    assert set(compared(query)) == sides


@pytest.mark.parametrize(
    ("query", "expected_selectors"),
    [
        ("rate(a_total[5m]) / on (x) group_left (y) b", {("a_total", "x"), ("b", "x,y")}),
        ('sum by (z) (a{l="v"}) > 0.5 unless c', {("a", "l,z"), ("c", "")}),
        ("max_over_time(rate(a[1m])[5m:1m]) - -b", {("a", ""), ("b", "")}),
        ("topk by (k) (2, (a))", {("a", "k")}),
    ],
)
def test_selectors_are_found_wherever_they_stand(
    query: str, expected_selectors: set[tuple[str, str]]
):
    assert {(s.name, ",".join(sorted(s.labels))) for s in selectors(query)} == expected_selectors


def test_what_is_no_query_is_refused():
    with pytest.raises(ValueError, match="unclosed"):
        selectors("sum(")
