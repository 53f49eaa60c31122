import asyncio
import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from controller.service.net.errors import AddressTakenError
from lab.harness.processes import free_port
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    RunningSidecar,
    SteerClient,
    report_message,
    running_sidecar,
    wait_until,
    with_timeout,
)


def _ask(port: int, path: str, method: str, headers: Mapping[str, str]) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


async def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await with_timeout(asyncio.to_thread(_ask, port, path, method, named))


async def steered(running: RunningSidecar, *reports: Any) -> SteerClient:
    stream = SteerClient(running, await running.introduce())
    await stream.send(*(reports or [report_message(1)]))
    await stream.plan()
    return stream


async def test_every_answer_forbids_all_that_the_page_does_not_need(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, page_port=port):
        for path in (
            "/",
            "/page.js",
            "/vendor/uplot/LICENSE",
            "/icon.svg",
            "/api/v1/state",
            "/nothing",
        ):
            _, headers, _ = await ask(port, path)
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert headers["Referrer-Policy"] == "no-referrer"


async def test_it_is_read_only(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, page_port=port):
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            status, headers, _ = await ask(port, "/api/v1/state", method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD")
        _, headers, body = await ask(port, "/page.js")
        assert int(headers["Content-Length"]) == len(body) > 1000
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HEAD /page.js HTTP/1.0\r\nHost: localhost\r\n\r\n")
        head = await with_timeout(reader.read())
        writer.close()
        assert f"Content-Length: {len(body)}".encode() in head
        assert head.endswith(b"\r\n\r\n")


async def test_a_name_that_was_made_to_point_here_is_not_served(tmp_path: Path):
    port = free_port()
    own = ("localhost", "LOCALHOST:1", "127.0.0.1:9466", "[::1]:80")
    others = (
        "evil.example",
        "127.0.0.1.evil.example",
        "",
        "10.0.0.1",
        "[",
        "evil.example:80@localhost.",
    )
    async with running_sidecar(tmp_path, page_port=port):
        for host in own:
            assert (await ask(port, "/api/v1/state", Host=host))[0] == 200, host
        for host in others:
            for path in ("/", "/page.js", "/api/v1/state", "/api/v1/engine?id=x"):
                assert (await ask(port, path, Host=host))[0] == 421, host


async def test_on_another_address_any_name_is_served(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, page_port=port, page_host="0.0.0.0"):
        assert (await ask(port, "/api/v1/state", Host="pod.example"))[0] == 200


async def test_what_has_not_changed_is_not_sent_again(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, page_port=port):
        _, headers, _ = await ask(port, "/page.js")
        status, _, body = await ask(port, "/page.js", If_None_Match=headers["ETag"])
        assert (status, body) == (304, b"")
        assert (await ask(port, "/page.css", If_None_Match=headers["ETag"]))[0] == 200


async def test_paths_lead_nowhere_else(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, page_port=port):
        for path in ("/../settings.py", "/page.js/..", "/%2e%2e/settings.py", "/api/v1", "//etc"):
            assert (await ask(port, path))[0] == 404
        assert (await ask(port, "/api/v1/engine?id=nobody"))[0] == 404
        assert (await ask(port, "/api/v1/engine?id=nobody&since=x"))[0] == 400
        assert (await ask(port, "/api/v1/engine?id=nobody&since=nan"))[0] == 400
        # Longer than a request line may be.
        assert (await ask(port, "/" + "x" * 70_000))[0] == 414


@pytest.mark.parametrize("ceiling", [0.0, 0.001])
async def test_it_shows_a_bound_on_the_time_per_token_if_there_is_one(
    tmp_path: Path, ceiling: float
):
    port = free_port()
    async with running_sidecar(
        tmp_path, page_port=port, planner={"tpot_ceiling_seconds": ceiling}
    ) as running:
        await steered(running)
        _, _, body = await ask(port, "/api/v1/engine?id=engine-0")
        bound = json.loads(body)["evidence"]["bound"]
        explanation = await running.explain()
        assert (bound is not None) is explanation.HasField("bound") is (ceiling > 0)
        if bound is not None:
            assert (bound["seconds"], bound["override_id"]) == (ceiling, "")
            assert (bound["kept"], bound["binds"], bound["kept_up_to"]) == (False, True, 0)
            expected = pytest.approx(explanation.bound.expected_seconds, rel=0.02)
            assert bound["expected_seconds"] == expected


async def test_it_tells_what_explain_tells_and_no_secret(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, page_port=port) as running:
        nothing_accepted = {"accepted_counts": [4, 0, 0]}
        stream = await steered(
            running, *(report_message(step, **nothing_accepted) for step in range(1, 60))
        )
        session = running.sidecar.registry.find_by_engine("engine-0")
        await wait_until(lambda: session.core.decision.report_count == 59)
        state = json.loads((await ask(port, "/api/v1/state"))[2])
        _, _, body = await ask(port, "/api/v1/engine?id=engine-0")
        explanation, page_data = await running.explain(), json.loads(body)
        (line,) = state["engines"]
        assert (line["engine_id"], line["batch_size"], line["link"]) == ("engine-0", 4, "steered")
        costs = page_data["costs"]
        column, row = costs["row"], {tuple(arm): i for i, arm in enumerate(costs["arms"])}
        assert costs["batch_sizes"][column] == 4
        for arm in explanation.arms:
            index = row[arm.drafter, arm.gamma]
            assert costs["seconds"][index][column] == pytest.approx(arm.step_seconds, rel=0.02)
            assert (index == costs["arm"]) is arm.chosen
        # The best choice is not the dearest one.
        dearest = max(row.values(), key=lambda index: costs["seconds"][index][column])
        assert costs["frontier"][column] != dearest
        rates = {i: costs["tokens_per_second"][i][column] for i in row.values()}
        assert costs["frontier"][column] == max(rates, key=lambda index: rates[index])
        chosen, off = costs["arm"], row["mtp", 0]
        assert line["gain"] == pytest.approx(rates[chosen] / rates[off], rel=0.02)
        survival = 1.0
        (curve,) = page_data["survival"]
        for position, estimate, low, high in zip(
            explanation.positions, curve["survival"], curve["low"], curve["high"], strict=True
        ):
            survival *= position.conditional_acceptance
            assert estimate == pytest.approx(survival, rel=0.02)
            assert low < estimate < high <= 1
        assert stream.session_id.encode() not in body
        assert stream.session_id not in json.dumps(state)


async def test_clients_that_say_nothing_hold_up_neither_steering_nor_the_rest(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, page_port=port) as running:
        stream = await steered(running)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        try:
            statuses = [(await ask(port, "/api/v1/state"))[0]]
            assert statuses == [503]
            await stream.send(report_message(2, batch_size=8, accepted_counts=[8, 0, 0]))
            assert (await running.status()).engine.engine_id == "engine-0"
        finally:
            for one in silent:
                one.close()
        while statuses[-1] != 200:
            statuses.append((await ask(port, "/api/v1/state"))[0])


async def test_a_port_that_is_taken_is_said(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressTakenError, match=rf"127\.0\.0\.1:{port}: .*--page-port"):
            async with running_sidecar(tmp_path, page_port=port):
                pass


async def test_without_a_port_there_is_no_page(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        assert running.sidecar._page is None


async def test_the_fleet_comes_in_pages_that_a_filter_narrows(tmp_path: Path):
    port = free_port()
    async with running_sidecar(tmp_path, page_port=port) as running:
        for name in ("pod-a:1", "pod-b:1", "pod-b:2"):
            await running.introduce(name)
        await running.introduce("pod-c:1", target_model="Llama")

        async def fleet(query: str) -> Any:
            status, _, body = await ask(port, f"/api/v1/fleet{query}")
            return status, json.loads(body) if status == 200 else body.decode()

        status, first = await fleet("?limit=3")
        assert status == 200
        assert [engine["engine_id"] for engine in first["engines"]] == [
            "pod-a:1", "pod-b:1", "pod-b:2",
        ]  # fmt: skip
        # Of all that match, not of this page.
        assert first["totals"]["engines"] == first["totals"]["unsteered"] == 4
        assert (first["shared"], first["refused"], first["left_out"]) == (False, 0, 0)
        assert "CONTROLLER_REDIS_URL" in first["trouble"]
        engine = first["engines"][0]
        assert (engine["local"], engine["link"], engine["age_seconds"]) == (True, "away", 0.0)
        _, rest = await fleet(f"?limit=3&after={quote(first['next'])}")
        assert [engine["engine_id"] for engine in rest["engines"]] == ["pod-c:1"]
        assert rest["next"] == ""
        for words, match_count in {
            "pod-b": 2,
            "POD-B link=away": 2,
            "llama": 1,
            "engine=pod-b": 0,
            "link=steered": 0,
            "gamma=0 model=target": 3,
            "%FF": 0,
        }.items():
            _, some = await fleet(f"?filter={quote(words, safe='%')}")
            assert some["totals"]["engines"] == len(some["engines"]) == match_count, words
        for wrong, message in {
            "filter=speed=9": "the filter names the field 'speed'",
            "filter=" + "x" * 257: "256 are allowed",
            "limit=0": "limit 0 must be in [1, 1000]",
            "limit=1001": "limit 1001 must be in [1, 1000]",
            "limit=x": "invalid literal",
            "after=" + "x" * 200: "`after` is not a value of this sidecar",
        }.items():
            status, text = await fleet(f"?{wrong}")
            assert (status, message in text) == (400, True), text
