import asyncio
import urllib.request
from collections import Counter
from pathlib import Path
from random import Random

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

import controller
from lab.harness.processes import free_port
from speculation.v1 import service_pb2
from tests.support.service_harness import (
    GAMMAS,
    RunningSidecar,
    SteerClient,
    failure,
    make_profile,
    report_message,
    running_sidecar,
    session_metrics,
    wait_until,
    with_timeout,
)

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(port: int) -> Series:
    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    families = text_string_to_metric_families(await with_timeout(asyncio.to_thread(get)))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def make_label_key(engine: str, **labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"engine": engine, **labels}.items()))


async def test_a_scrape_tells_what_happened(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, metrics_port=port) as running:
        running.sidecar.profiles.add(make_profile(target_model="profiled"))
        stream = SteerClient(running, await running.introduce("a"))
        await running.introduce("b", target_model="profiled")
        await stream.send(
            report_message(1),
            report_message(2, step_seconds=-1.0),
            report_message(3, gamma=9, accepted_counts=[4, *9 * [0]]),
            report_message(4, flags={"unsteered": True, "eager_fallback": True}),
            report_message(4),
            dropped=3,
        )
        # In one response, or in several where the machine is slow.
        rejected = 0
        while rejected < 3:
            rejected += len(await stream.rejections())
        metric_values = await scrape(port)
    version = (("version", controller.__version__),)
    assert metric_values["speculation_controller_build_info", version] == 1
    assert metric_values["speculation_engines", (("costs", "measured"),)] == 1
    assert metric_values["speculation_engines", (("costs", "prior"),)] == 1
    assert metric_values["speculation_overloaded", ()] == 0
    assert metric_values["speculation_messages_total", make_label_key("a")] == 1
    assert metric_values["speculation_reports_total", make_label_key("a")] == 2
    assert metric_values["speculation_dropped_reports_total", make_label_key("a")] == 3
    assert metric_values["speculation_unsteered_steps_total", make_label_key("a")] == 1
    assert metric_values["speculation_eager_steps_total", make_label_key("a")] == 1
    for code in ("INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION"):
        assert (
            metric_values["speculation_rejected_reports_total", make_label_key("a", code=code)] == 1
        )
    assert metric_values["speculation_step_seconds_total", make_label_key("a")] == 0.02
    assert metric_values["speculation_draft_tokens_total", make_label_key("a")] == 16
    assert metric_values["speculation_accepted_tokens_total", make_label_key("a")] == 10
    assert metric_values["speculation_generated_tokens_total", make_label_key("a")] == 18
    assert (
        metric_values["speculation_plans_total", make_label_key("a", reason="profile-missing")] >= 1
    )
    assert metric_values["speculation_plan_epoch", make_label_key("a")] >= 1
    assert metric_values["speculation_gamma", make_label_key("a", drafter="mtp")] in {0, 1, 2, 3}
    assert metric_values["speculation_profiled", make_label_key("a")] == 0
    assert metric_values["speculation_profiled", make_label_key("b")] == 1
    assert metric_values["speculation_steering", make_label_key("a")] == 1
    assert metric_values["speculation_steering", make_label_key("b")] == 0
    assert metric_values["speculation_measuring", make_label_key("a")] == 0
    assert metric_values["speculation_probe_share", make_label_key("a")] >= 0
    assert metric_values["speculation_expected_acceptance_length", make_label_key("a")] >= 1
    assert metric_values["speculation_predicted_step_seconds", make_label_key("a")] > 0
    assert metric_values["process_resident_memory_bytes", ()] > 0


async def test_acceptance_is_what_was_counted(tmp_path: Path):
    """Row by row, of a sidecar that has had steps of all draft lengths."""
    port, random = free_port(), Random(1)
    accepted, gammas, messages = Counter[int](), Counter[int](), []
    for step in range(1, 61):
        gamma = random.choice(GAMMAS)
        rows = [min(gamma, int(random.expovariate(0.7))) for _ in range(4)]
        counts = [rows.count(k) for k in range(gamma + 1)]
        messages.append(report_message(step, gamma=gamma, accepted_counts=counts))
        gammas[gamma] += len(rows)
        accepted.update(rows if gamma else ())
    drafts, steps = accepted.total(), gammas.total()
    tokens = sum(k * n for k, n in accepted.items())
    drafted = sum(gamma * n for gamma, n in gammas.items())
    assert 0 < drafts < steps
    async with running_sidecar(tmp_path, metrics_port=port) as running:
        stream = SteerClient(running, await running.introduce("a"))
        before = await scrape(port)
        await stream.send(*messages)
        session = running.sidecar.registry.find_by_engine("a")
        await wait_until(lambda: session.counters.reports == len(messages))
        # The last minute is kept once a second.
        length = 1 + tokens / drafts
        await wait_until(lambda: session.last_minute.acceptance_length == pytest.approx(length))
        metric_values = await scrape(port)

    def counted(name: str, **labels: str) -> float:
        return metric_values[f"speculation_{name}", make_label_key("a", **labels)]

    name = "accepted_tokens_per_draft"
    for k in GAMMAS:
        at_most = sum(n for value, n in accepted.items() if value <= k)
        assert counted(f"{name}_bucket", le=f"{k}.0") == at_most
        if k:
            more = drafts - sum(n for value, n in accepted.items() if value < k)
            assert counted("accepted_tokens_per_pos_total", position=str(k - 1)) == more
    assert counted(f"{name}_bucket", le="+Inf") == counted(f"{name}_count") == drafts
    assert counted(f"{name}_sum") == counted("accepted_tokens_total") == tokens
    assert counted("drafts_total") == drafts
    assert counted("draft_tokens_total") == drafted
    assert counted("sequence_steps_total") == steps
    assert counted("generated_tokens_total") == steps + tokens
    assert counted("acceptance_length") == pytest.approx(length)
    assert counted("draft_acceptance_rate") == pytest.approx(tokens / drafted)
    assert counted("accepted_per_verified") == pytest.approx((tokens + drafts) / (drafted + drafts))
    expected = counted("expected_accepted_tokens_total")
    assert counted("acceptance_length_error") == pytest.approx((expected - tokens) / drafts)
    took, error = counted("plain_seconds_total"), counted("prediction_error_seconds_total")
    assert counted("step_time_error_ratio") == pytest.approx(error / took)
    predicted = counted("predicted_seconds_total")
    assert counted("step_time_bias_ratio") == pytest.approx(predicted / took - 1)
    # Every series of a counter is there before its first increase, and no ratio of nothing.
    wanted = {key for key in metric_values if "accepted_tokens_per" in key[0]}
    assert wanted <= set(before)
    assert ("speculation_acceptance_length", make_label_key("a")) not in before


async def test_every_number_is_shown_under_its_own_name(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        session = running.sidecar.registry.find_by_engine("engine-0")
        numbers = iter(range(1000, 2000))
        counted = {
            name: name
            for name in (
                "reports", "dropped_reports", "step_seconds", "drafts", "unsteered_steps",
                "lease_losses", "eager_steps", "switched_steps", "probe_steps", "drafter_changes",
                "drafter_updates", "drafter_resets",
            )
        } | {"drafted_tokens": "draft_tokens", "version_swaps": "draft_version_swaps"}  # fmt: skip
        summed = {
            "plain_seconds": "plain_seconds", "predicted_seconds": "predicted_seconds",
            "error_seconds": "prediction_error_seconds",
            "expected_tokens": "expected_accepted_tokens",
        }  # fmt: skip
        wanted: dict[tuple[str, ...], float] = {}
        for owner, names in ((session.counters, counted), (session.core.prediction_audit, summed)):
            for name, metric in names.items():
                wanted[f"speculation_{metric}_total",] = number = next(numbers)
                setattr(owner, name, number)
        session.core.prediction_audit.alternative_seconds["off"] = wanted[
            "speculation_estimated_instead_seconds_total", "off"
        ] = next(numbers)
        session.counters.sequences_by_length = [1, 20, 300]
        metric_values = session_metrics(session)
    assert {name: metric_values[name] for name in wanted} == wanted
    assert metric_values["speculation_accepted_tokens_total",] == 620
    assert metric_values["speculation_generated_tokens_total",] == 941
    per_position = "speculation_accepted_tokens_per_pos_total"
    assert (metric_values[per_position, "0"], metric_values[per_position, "1"]) == (320, 300)


async def test_the_series_of_an_engine_end_with_its_session(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, metrics_port=port) as running:
        await running.introduce("a")
        assert ("speculation_reports_total", make_label_key("a")) in await scrape(port)
        running.sidecar.registry.close(RuntimeWarning("over"))  # type: ignore[arg-type]
        assert ("speculation_reports_total", make_label_key("a")) not in await scrape(port)


async def measured_flag(running: RunningSidecar, port: int) -> float:
    return (await scrape(port))["speculation_measuring", make_label_key("a")]


async def test_a_measurement_shows(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, metrics_port=port) as running:
        await running.introduce("a")
        call = running.profiling.Measure()
        await with_timeout(
            call.write(service_pb2.MeasureRequest(engine_id="a", drafter="mtp", gamma=1))
        )
        await with_timeout(call.read())
        assert await measured_flag(running, port) == 1
        await with_timeout(call.done_writing())
        assert await with_timeout(call.read()) is grpc.aio.EOF
        assert await measured_flag(running, port) == 0


async def test_refused_calls_leave_the_metrics_alone(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, metrics_port=port) as running:
        request = service_pb2.DecideRequest(session_id="nobody", report=report_message(1))
        await failure(running.speculation.Decide(request))
        metric_values = await scrape(port)
    assert not [name for name, labels in metric_values if name.startswith("speculation_reports")]
