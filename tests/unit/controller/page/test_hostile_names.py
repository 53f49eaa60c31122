"""Names that were chosen to harm, everywhere the page shows one, in a real browser."""

from collections.abc import Iterator

import grpc
import pytest

from controller.service.views.fleet_summary import EngineSummary, encode_summary
from lab.harness.processes import free_port
from speculation.v1 import policy_pb2, policy_pb2_grpc
from tests.support.redis_server import RedisServer
from tests.support.sidecar_process import sidecar_process
from tests.unit.controller.page.chromium import PATIENCE_SECONDS, Page
from tests.unit.controller.page.conftest import HOSTILE, ROW, Scene, introduce

SCRIPT = "</td><script>window.hurt=1</script>\"><svg onload='window.hurt=1'>"
# Right-to-left override and isolate, a control of ISO 6429, NUL, an invisible joiner, a new line.
UNSEEN = "model \u202egnp.evil\u2066 \x9b31m \x00 \u200d \x7f \n end"
SEEN = r"model \u{202e}gnp.evil\u{2066} \u{9b}31m \u{0} \u{200d} \u{7f} \u{a} end"
LONG_TEXT = "x" * 400
# (engine, model, drafter): the first two are what every object of JavaScript has.
ENGINES = (
    ("__proto__", "constructor", "__proto__"),
    ("constructor", "__proto__", "constructor"),
    ("bidi", UNSEEN, "toString 7"),
    ("markup", SCRIPT, HOSTILE),
    ("long", LONG_TEXT * 10, "d" * 64),
    ("emoji", "\U0001f468\U0001f3fd \U0001f600 \\u0000 %00 &#0;", "\U0001f600" * 8),
)
RAW = r"/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/"


@pytest.fixture(scope="module")
def hostile(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    directory, port, page = tmp_path_factory.mktemp("hostile"), free_port(), scene.page
    with (
        RedisServer(tmp_path_factory.mktemp("redis")) as redis,
        sidecar_process(
            directory, "--page-port", str(port), "--ready-with", "guess",
            environment={"CONTROLLER_REDIS_URL": redis.url},
        ) as sidecar,
    ):  # fmt: skip
        for engine in ENGINES:
            introduce(sidecar.address, *engine)
        operators = sidecar.address.replace("controller.sock", "controller-operators.sock")
        with grpc.insecure_channel(operators) as channel:
            for name, text in (("constructor", SCRIPT), ("toString", LONG_TEXT)):
                override = policy_pb2.Override(
                    override_id=name, scope=policy_pb2.Scope(engine_id="markup"),
                    rule=policy_pb2.OverrideRule(gamma=1), author=text[:64], reason=text,
                )  # fmt: skip
                policy_pb2_grpc.PolicyServiceStub(channel).SetOverride(
                    policy_pb2.SetOverrideRequest(override=override), timeout=PATIENCE_SECONDS
                )
        other = EngineSummary(
            "toString", SCRIPT, 8, "constructor", 3, "steered", "constructor", 0.5, 2.5, 12.0, 1.5,
            ("__proto__",), generated_per_second=9.0,
        )  # fmt: skip
        with redis.client() as client:
            now = client.time()
            assert isinstance(now, tuple)
            summary = encode_summary("hasOwnProperty", "1.0", 60.0, [other])
            client.set("{speculation:1}:fleet:0123456789abcdef", summary)
            client.zadd("{speculation:1}:fleet", {"0123456789abcdef": 1000 * now[0]})
        page.resize(1280, 1000)
        page.open(f"http://127.0.0.1:{port}")
        try:
            page.wait_until(
                f"document.querySelectorAll('#engines tbody tr').length === {len(ENGINES)}"
            )
            yield page
        finally:
            page.open(scene.origin)
            page.requests.clear()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine[0])
def test_whatever_its_name_an_engine_is_shown_and_nothing_runs(
    hostile: Page, engine: tuple[str, str, str]
):
    engine_id, model, drafter = engine
    hostile.value(f"{ROW.format(engine_id)}.click()")
    hostile.wait_until(f"document.getElementById('engine-title').textContent === {engine_id!r}")
    shown = SEEN if model == UNSEEN else model
    hostile.wait_until("!document.getElementById('detail').hidden")
    facts = "[...document.querySelectorAll('#facts dd')].map(it => it.textContent)"
    hostile.wait_until(f"{facts}.length > 0")
    assert shown in hostile.value(facts)
    costs = "[...document.querySelectorAll('.heat th[scope=row]')].map(it => it.textContent)"
    assert f"{drafter} γ 1" in hostile.value(costs)
    assert hostile.value("document.getElementById('stale').hidden")
    assert hostile.value("window.hurt === undefined")
    assert hostile.value("document.querySelectorAll('td svg, td script, td img').length") == 0
    assert not hostile.value(f"{RAW}.test(document.body.textContent)")
    assert hostile.value("looks.overflowing()") == []
    assert hostile.problems == []


def test_overrides_and_engines_of_others_are_text(hostile: Page):
    cells = (
        "[...document.querySelectorAll('{} tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    hostile.wait_until("document.querySelectorAll('#overrides tbody tr').length === 2")
    overrides = {row[6]: row[3] for row in hostile.value(cells.format("#overrides"))}
    assert overrides == {"constructor": SCRIPT, "toString": LONG_TEXT}
    hostile.wait_until(
        f"document.querySelectorAll('#fleet-engines tbody tr').length > {len(ENGINES)}"
    )
    fleet = {row[0]: row for row in hostile.value(cells.format("#fleet-engines"))}
    assert fleet["toString"][1:4] == ["hasOwnProperty", "steered", "γ 3 with constructor"]
    assert fleet["toString"][8:10] == ["constructor", "__proto__"]
    assert hostile.value("window.hurt === undefined")
    assert hostile.problems == []
