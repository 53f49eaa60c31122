"""The page in a real browser, beside a real sidecar that steers a real agent."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from controller.wire.override_text import PRECEDENCE
from lab.harness.ports import free_port
from speculation.v1 import engine_pb2, service_pb2, service_pb2_grpc
from tests.support.linked_engine import LinkedEngine, linked_engine
from tests.support.service_harness import engine_message, report_message
from tests.support.sidecar_process import SidecarProcess, controller, sidecar_process
from tests.unit.controller.page.chromium import PATIENCE_SECONDS, Page, chromium

HOSTILE = "<img src=x onerror=window.hurt=1>"
ROW = "document.querySelector('tr[data-engine=\"{}\"]')"


@dataclass
class Scene:
    """What the tests look at; they go in the order of this file."""

    page: Page
    sidecar: SidecarProcess
    engine: LinkedEngine
    directory: Path
    port: int
    processes: ExitStack

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cell(self, engine: str, column: int) -> str:
        """JavaScript for a cell's text."""
        return f"{ROW.format(engine)}?.cells[{column}].textContent"

    def run_until(self, expression: str, batch_size: int) -> None:
        """Steps until the page shows it."""
        for _ in range(600):
            self.engine.run(50, batch_size)
            if self.page.value(expression):
                return
        raise AssertionError(f"never true: {expression}")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """pod-7 is steered by the real link; pod-8 has names that no page should believe."""
    directory, port = tmp_path_factory.mktemp("page"), free_port()
    with ExitStack() as stack, ExitStack() as processes:
        sidecar = processes.enter_context(
            sidecar_process(directory, "--page-port", str(port), "--ready-with", "guess")
        )
        engine = stack.enter_context(linked_engine(sidecar.address, "pod-7"))
        _introduce_hostile(sidecar.address)
        page = stack.enter_context(chromium(tmp_path_factory.mktemp("browser")))
        page.resize(1280, 1000)
        scene = Scene(page, sidecar, engine, directory, port, processes)
        page.open(scene.origin)
        yield scene


def _introduce_hostile(address: str) -> None:
    message = engine_message("pod-8", target_model=HOSTILE)
    message.drafters[0].name = HOSTILE
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        asked = service_pb2.IntroduceRequest(engine=message)
        session = stub.Introduce(asked, timeout=PATIENCE_SECONDS).session_id
        report: engine_pb2.StepReport = report_message(1, drafter=HOSTILE)
        stub.Decide(
            service_pb2.DecideRequest(session_id=session, report=report), timeout=PATIENCE_SECONDS
        )


def test_it_shows_the_steered_engine_and_follows_its_batch(scene: Scene):
    page = scene.page
    scene.run_until(f"{scene.cell('pod-7', 1)} === '4'", 4)
    assert page.value(scene.cell("pod-7", 3)) == "eagle3"
    scene.run_until(f"{scene.cell('pod-7', 9)} === 'steered'", 4)
    scene.run_until(f"Number({scene.cell('pod-7', 4)}) > 1", 4)
    scene.run_until(f"Number({scene.cell('pod-7', 5)}) > 0", 4)
    scene.run_until(f"{scene.cell('pod-7', 1)} === '23'", 23)
    assert page.value("document.getElementById('live').textContent") == "live"
    assert page.value("document.getElementById('stale').hidden") is True


def test_it_draws_history_costs_survival_and_reasons(scene: Scene):
    page = scene.page
    scene.run_until("document.querySelectorAll('#time > svg .path').length === 1", 23)
    scene.run_until(
        "document.querySelector('#time > svg .path').getAttribute('d').includes('H')", 23
    )
    scene.run_until(
        "document.querySelector('#time > svg .accept').getAttribute('d').includes('L')", 23
    )
    assert page.value("document.querySelector('#time svg').getAttribute('aria-label')")
    # 6 draft lengths, a best one for every batch size, and one that runs.
    columns = page.value("document.querySelectorAll('.heat thead th').length") - 1
    assert page.value("document.querySelectorAll('.heat tbody tr').length") == 6
    assert page.value("document.querySelectorAll('.heat .frontier').length") == columns
    assert page.value("document.querySelectorAll('.heat .now').length") == 1
    scene.run_until("document.querySelector('.heat .now').title.includes(' at B 23: ')", 23)
    assert "runs now" in page.value("document.querySelector('.heat .now').ariaLabel")
    assert page.value("document.querySelectorAll('.heat td.guess').length") == 6 * columns
    assert page.value("document.querySelectorAll('#survival > svg circle').length") == 7
    assert page.value(
        "document.querySelector('#survival > svg .band').getAttribute('d').length > 20"
    )
    scene.run_until("document.querySelectorAll('#trail li time').length > 0", 4)


def test_a_bound_on_the_time_per_token_is_among_the_facts(scene: Scene):
    address = ("--address", scene.sidecar.address)
    words = ("override", "set", "--fleet", "--id", "slow", "--reason", "why", "--tpot-max-ms")
    set_ = controller(*words, "500", *address)
    assert set_.returncode == 0, set_.stderr
    scene.run_until("document.querySelector('#facts').textContent.includes('of at most 500 ms')", 4)
    assert "not kept" not in scene.page.value("document.querySelector('#facts').textContent")
    clear = controller("override", "clear", "slow", "--reason", "why", *address)
    assert clear.returncode == 0, clear.stderr
    scene.run_until("!document.querySelector('#facts').textContent.includes('of at most')", 4)


def test_overrides_are_shown_with_author_and_end_and_nothing_becomes_markup(scene: Scene):
    page = scene.page
    for more in (
        ("--fleet", "--at-most", "2", "--ttl", "2h"),
        ("--engine", "pod-7", "--off", "--for-ever"),
    ):
        set_ = controller(
            "override", "set", *more, "--author", HOSTILE, "--reason", HOSTILE,
            "--address", scene.sidecar.address,
        )  # fmt: skip
        assert set_.returncode == 0, set_.stderr
    scene.run_until("document.querySelectorAll('#overrides tbody tr').length === 2", 4)
    assert page.value("document.querySelector('#precedence').textContent") == PRECEDENCE
    rows = page.value(
        "[...document.querySelectorAll('#overrides tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    fleet = next(row for row in rows if row[0] == "fleet")
    mine = next(row for row in rows if row[0] == "engine pod-7")
    assert fleet[1:4] == ["gamma <= 2", HOSTILE, HOSTILE]
    assert fleet[4].startswith(("in 2.0 h", "in 120 min"))
    assert mine[1] == "no speculation"
    assert mine[4] == "never"
    scene.run_until(f"{scene.cell('pod-7', 2)} === '0'", 4)
    scene.run_until(f"{scene.cell('pod-7', 11)}.includes('{fleet[5]}')", 4)
    # What is forbidden is faint: of six draft lengths only gamma = 0 is left.
    scene.run_until(
        "[...document.querySelectorAll('.heat tbody tr')]"
        ".filter(row => row.querySelector('.off')).length === 5",
        4,
    )
    assert page.value("document.querySelectorAll('.heat .off.frontier').length") == 0
    assert page.value(scene.cell("pod-8", 3)) == HOSTILE


def test_the_keyboard_is_enough(scene: Scene):
    page = scene.page
    page.value("document.activeElement.blur()")
    stops = []
    for _ in range(4):
        page.press("Tab")
        stops.append(
            page.value("(e => e.id || e.className || e.dataset.engine)(document.activeElement)")
        )
        assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert stops[:3] == ["skip", "theme", "pod-7"]
    page.value("document.querySelector('tr[data-engine=\"pod-7\"]').focus()")
    page.press("ArrowDown")
    page.until("document.getElementById('engine-title').textContent === 'pod-8'")
    assert page.value("document.activeElement.dataset.engine") == "pod-8"
    assert page.value(f"{ROW.format('pod-8')}.getAttribute('aria-selected')") == "true"
    assert page.value(f"{ROW.format('pod-7')}.getAttribute('aria-selected')") == "false"
    page.until(f"document.getElementById('facts').textContent.includes({HOSTILE!r})")
    page.until(f"document.querySelector('.heat th[scope=row]').textContent.includes({HOSTILE!r})")
    page.press("ArrowDown")
    assert page.value("document.activeElement.dataset.engine") == "pod-8"
    page.press("Home")
    page.until("document.getElementById('engine-title').textContent === 'pod-7'")
    page.press("End")
    page.until("document.getElementById('engine-title').textContent === 'pod-8'")
    assert page.value("document.images.length") == 1
    assert page.value("window.hurt === undefined")
    page.press("ArrowUp")
    page.until("document.getElementById('engine-title').textContent === 'pod-7'")


def test_everything_that_is_shown_has_a_name(scene: Scene):
    nameless = scene.page.value(
        "[...document.querySelectorAll('button, a, table, svg[role=img], section, [tabindex]')]"
        ".filter(e => !(e.ariaLabel || e.getAttribute('aria-labelledby') || e.innerText))"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []


CONTRAST = """(() => {
  const light = (c) => c.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = light(getComputedStyle(document.querySelector('main > section')).backgroundColor);
  return Math.min(...['th', '.quiet', 'td', '.why', 'dd', 'dt', '.detail'].map(s => {
    const text = light(getComputedStyle(document.querySelector('main ' + s)).color);
    return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
  }));
})()"""


def test_it_is_light_or_dark_as_the_system_says_or_as_told(scene: Scene):
    page = scene.page
    ground = "getComputedStyle(document.body).backgroundColor"
    page.prefer(prefers_color_scheme="light")
    page.until("document.documentElement.dataset.theme === 'light'")
    light = page.value(ground)
    assert page.value(CONTRAST) >= 4.5
    page.prefer(prefers_color_scheme="dark")
    page.until("document.documentElement.dataset.theme === 'dark'")
    assert page.value(ground) != light
    assert page.value(CONTRAST) >= 4.5
    page.value("document.getElementById('theme').focus()")
    page.press("Enter")
    assert page.value("document.getElementById('theme').ariaLabel") == "Colours: light"
    assert page.value(ground) == light
    page.open(f"{scene.origin}/?again")
    page.until("document.documentElement.dataset.theme === 'light'")
    page.value("document.getElementById('theme').focus()")
    page.press("Enter")
    page.press("Enter")
    assert page.value("document.documentElement.dataset.theme") == "dark"
    page.until(ROW.format("pod-7") + " !== null")


def test_motion_is_left_out_where_it_is_not_wanted(scene: Scene):
    moves = "getComputedStyle(document.getElementById('live')).transitionDuration"
    scene.page.prefer(prefers_reduced_motion="no-preference")
    assert scene.page.value(moves) != "0s"
    scene.page.prefer(prefers_reduced_motion="reduce")
    assert scene.page.value(moves) == "0s"


def test_it_asks_nobody_else_and_its_console_is_quiet(scene: Scene):
    assert len(scene.page.requests) > 8
    assert [url for url in scene.page.requests if not url.startswith(scene.origin)] == []
    assert scene.page.problems == []


def test_it_says_since_when_it_is_stale_and_recovers(scene: Scene):
    page = scene.page
    scene.sidecar.stop()
    page.until("!document.getElementById('stale').hidden")
    said = page.value("document.getElementById('stale').textContent")
    assert said.startswith("Stale since ")
    assert page.value("document.getElementById('live').textContent") == "stale"
    # What was known stays.
    assert page.value(scene.cell("pod-7", 3)) == "eagle3"
    scene.processes.enter_context(
        sidecar_process(scene.directory, "--page-port", str(scene.port), "--ready-with", "guess")
    )
    page.until("document.getElementById('stale').hidden")
    page.until("document.getElementById('live').textContent === 'live'")
    scene.engine.wait_for_a_plan()
    page.until(f"{ROW.format('pod-7')} !== null")
    page.until(f"{ROW.format('pod-8')} === null")
