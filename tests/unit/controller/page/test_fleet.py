"""The fleet's table, in a real browser, beside a real sidecar with a real Redis.

The engines of the other sidecar stand in Redis as that sidecar would write them.
"""

from collections.abc import Iterator

import pytest

from controller.service.views.fleet_summary import EngineSummary, encode_summary
from lab.harness.processes import free_port
from tests.support.redis_server import RedisServer
from tests.support.sidecar_process import sidecar_process
from tests.unit.controller.page.chromium import Page
from tests.unit.controller.page.conftest import HOSTILE, Scene, introduce

INDEX = "{speculation:1}:fleet"
SOURCE = "0123456789abcdef"
OTHERS = 130
ROWS = "document.querySelectorAll('#fleet-engines tbody tr').length"
FILTER = "document.getElementById('filter')"
OVERRIDE = "20261126-114934-b6b4"


def engine(number: int) -> EngineSummary:
    """Every tenth one is on its own, and one has an override and a hostile drafter."""
    special = number == 7
    return EngineSummary(
        engine_id=f"decode-{number:03}.workers.us-east-1.compute.internal:30000",
        target_model=HOSTILE,
        batch_size=8,
        drafter=HOSTILE if special else "eagle3",
        gamma=3,
        link="steered" if number % 10 else "alone",
        reason="exploit",
        seconds_since_report=0.5,
        accept_length=2.5,
        tokens_per_second=1200.0,
        gain=1.5,
        overrides=(OVERRIDE,) if special else (),
        generated_per_second=900.0,
    )


@pytest.fixture(scope="module")
def fleet(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of a sidecar with one engine, whose Redis has those of another one."""
    directory, port, page = tmp_path_factory.mktemp("fleet"), free_port(), scene.page
    flags = ("--page-port", str(port), "--ready-with", "guess")
    with (
        RedisServer(tmp_path_factory.mktemp("redis")) as redis,
        sidecar_process(
            directory, *flags, environment={"CONTROLLER_REDIS_URL": redis.url}
        ) as sidecar,
    ):
        introduce(sidecar.address, "pod-1")
        with redis.client() as client:
            now = client.time()
            assert isinstance(now, tuple)
            text = encode_summary("other-pod", "1.0", 60.0, list(map(engine, range(OTHERS))))
            client.set(f"{INDEX}:{SOURCE}", text)
            client.zadd(INDEX, {SOURCE: 1000 * now[0]})
        page.open(f"http://127.0.0.1:{port}")
        try:
            page.wait_until(f"{ROWS} === 50")
            yield page
        finally:
            page.open(scene.origin)
            page.requests.clear()


def filter_by(page: Page, words: str) -> None:
    page.value(f"{FILTER}.value = {words!r}; {FILTER}.dispatchEvent(new Event('input'))")


def total(name: str) -> str:
    return (
        "[...document.querySelectorAll('#totals div')]"
        f".find(it => it.firstChild.textContent === {name!r}).lastChild.textContent"
    )


def test_it_lists_the_engines_of_all_sidecars_with_totals(fleet: Page):
    fleet.wait_until(f"{total('engines')} === '{OTHERS + 1} of 2 sidecars'")
    assert fleet.value(total("not steered")) == "14"
    assert fleet.value(total("with overrides")) == "1"
    assert fleet.value(total("gained per second")) == f"+{OTHERS * 300:,}"
    glance = fleet.value("document.getElementById('fleet-glance').textContent")
    assert glance == f"fleet: {OTHERS + 1} engines, 14 not steered"
    assert "the first 50 are shown" in fleet.value("matches.textContent")
    for rows in (100, OTHERS + 1):
        fleet.value("document.getElementById('more').click()")
        fleet.wait_until(f"{ROWS} === {rows}")
    assert fleet.value("document.getElementById('more').hidden")
    assert fleet.value("document.getElementById('fleet-alone').hidden")


def test_a_filter_narrows_rows_and_totals_and_a_bad_one_is_explained(fleet: Page):
    filter_by(fleet, "link=alone other-pod")
    fleet.wait_until(f"{ROWS} === 13")
    assert fleet.value(total("engines")) == "13 of 1 sidecar"
    assert fleet.value("matches.textContent") == "13 engines match"
    filter_by(fleet, "colour=red")
    fleet.wait_until(f"{FILTER}.ariaInvalid === 'true'")
    assert "colour" in fleet.value("matches.textContent")
    # The refusal is all that the console reports about the fleet.
    assert ["status of 400" in problem for problem in fleet.problems] == [True]
    fleet.problems.clear()
    filter_by(fleet, "no-such-engine")
    fleet.wait_until("matches.textContent === '0 engines match'")
    assert fleet.value("document.getElementById('fleet-engines').hidden")
    filter_by(fleet, "")
    fleet.wait_until(f"{ROWS} === 50")


def test_names_from_redis_are_text_and_only_own_engines_are_links(fleet: Page):
    filter_by(fleet, f"override={OVERRIDE}")
    fleet.wait_until(f"{ROWS} === 1")
    row = "[...document.querySelector('#fleet-engines tbody tr').cells].map(it => it.textContent)"
    cells = fleet.value(row)
    assert cells[:3] == [
        "decode-007.workers.us-east-1.compute.internal:30000",
        "other-pod",
        "steered",
    ]
    assert cells[3] == f"γ 3 with {HOSTILE}"
    assert cells[9] == OVERRIDE
    assert cells[10].endswith(" ago")
    assert fleet.value("window.hurt === undefined")
    assert fleet.value("document.querySelector('#fleet-engines a') === null")
    filter_by(fleet, "engine=pod-1")
    fleet.wait_until("document.querySelector('#fleet-engines a')?.textContent === 'pod-1'")
    assert fleet.value("document.querySelector('#fleet-engines a').hash") == "#show=pod-1"
    filter_by(fleet, "")
    fleet.wait_until(f"{ROWS} === 50")


@pytest.mark.parametrize("width", [390, 768, 1260, 1440])
def test_it_fits_every_width_and_can_be_read(fleet: Page, width: int):
    theme = "dark" if width == 390 else "light"
    fleet.prefer(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
    fleet.resize(width, 900)
    fleet.wait_until(f"document.documentElement.dataset.theme === '{theme}'")
    assert fleet.value("innerWidth") == width
    assert fleet.value("looks.overflowing()") == []
    texts, _, pale = fleet.value("looks.contrast()")
    assert texts > 500
    assert pale == []


def test_without_a_redis_it_says_how_to_see_the_fleet(scene: Scene, fleet: Page):
    fleet.open(scene.origin)
    fleet.wait_until("!document.getElementById('fleet-alone').hidden")
    text = fleet.value("document.getElementById('fleet-alone').innerText")
    assert "only its own engines are known" in text
    assert "CONTROLLER_REDIS_URL" in text
    assert fleet.value("document.getElementById('fleet-shared').hidden")
