"""How the page looks and is used at three widths, light and dark, in a real browser."""

import time
from collections.abc import Iterator
from itertools import groupby

import pytest

from tests.support.sidecar_process import controller
from tests.unit.controller.page.chromium import Page
from tests.unit.controller.page.conftest import HOSTILE, Scene

WIDTHS = (390, 768, 1440)
# Where the keyboard may stop: a chart has 600 s, each of which begins and ends with a value.
STOPS_MAX = 1200
RANGE = "document.getElementById('time-range').textContent"
TIME_SHOWN = "document.getElementById('time-at').textContent"
GAMMA = "document.querySelector('#time-draft + .legend b')?.textContent"


@pytest.fixture(scope="module")
def busy(scene: Scene) -> Iterator[Scene]:
    """The scene with a history: a pause, two batch sizes, and an override that shapes the plan."""
    address = ("--address", scene.sidecar.address)
    scene.run_until("document.querySelectorAll('#trail li').length > 0", 4)
    scene.run_until(f"{GAMMA} > 0", 4)
    bound = ("--engine", "pod-7", "--id", "bound", "--at-most", "2", "--reason", HOSTILE)
    set_ = controller("override", "set", *bound, *address)
    assert set_.returncode == 0, set_.stderr
    time.sleep(3)
    scene.run_until(f"{GAMMA} > 0", 23)
    scene.run_until("held.textContent.includes('gamma <= 2')", 23)
    # Which of the two depends on what the unlimited choice would be, and so on times.
    limited = "why.textContent.endsWith('Overrides limit the choice.')"
    reason = "document.getElementById('why-detail').textContent.startsWith('override')"
    scene.run_until(f"{limited} || {reason}", 23)
    yield scene
    clear = controller("override", "clear", "bound", "--reason", "enough", *address)
    assert clear.returncode == 0, clear.stderr
    scene.run_until("held.textContent === 'No override shapes this plan.'", 23)


def shown_at(scene: Scene, width: int, theme: str) -> Page:
    page = scene.page
    page.prefer(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
    page.resize(width, 900)
    page.wait_until(f"document.documentElement.dataset.theme === '{theme}'")
    # The newest second is drawn, and what scrolls is marked, at the next look.
    scene.run_until(f"document.querySelectorAll('.chart').length === 3 && {GAMMA} > 0", 23)
    return page


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows_overlaps_or_is_pale(busy: Scene, width: int, theme: str):
    page = shown_at(busy, width, theme)
    assert page.value("innerWidth") == width
    assert page.value("looks.overflowing()") == []
    page.wait_until("looks.unmarked().length === 0")
    assert page.value("looks.times(document.querySelector('#time-draft canvas')).length") >= 2
    assert page.value("looks.clashing()") == []
    texts, samples, pale = page.value("looks.contrast()")
    assert pale == []
    assert texts > 60
    assert samples >= 8
    assert page.value("looks.unlike()") == []


def test_on_a_phone_the_cost_table_scrolls_with_the_running_column_in_view(busy: Scene):
    page = shown_at(busy, 390, "light")
    assert page.value("cost.scrollWidth > cost.clientWidth")
    is_within = (
        "(([box, it]) => it.left >= box.left && it.right <= box.right)"
        "([cost, document.querySelector('.heat .now')].map(e => e.getBoundingClientRect()))"
    )
    page.wait_until(is_within)


def test_the_pointer_reads_values_on_both_charts(busy: Scene):
    page = shown_at(busy, 1440, "light")
    assert page.value(TIME_SHOWN).startswith("newest values, ")
    x, y = middle(page, "time-load", 0.98)
    page.point(x, y)
    speed = "document.querySelectorAll('#time-load + .legend b')[1].textContent"
    # Seconds in which this machine had no time for a step have no values.
    busy.run_until(
        f"{TIME_SHOWN}.startsWith('values at ') && {GAMMA} > 0 && parseFloat({speed}) > 0", 23
    )
    page.point(x, 1)
    page.wait_until(f"{TIME_SHOWN}.startsWith('newest values, ')")


def middle(page: Page, chart: str, share: float = 0.5) -> tuple[float, float]:
    """A point of a chart; share: of its width, from the left."""
    page.value(f"document.getElementById('{chart}').scrollIntoView({{block: 'center'}})")
    box = page.value(
        f"(it => [it.left, it.top, it.width, it.height])"
        f"(document.querySelector('#{chart} .u-over').getBoundingClientRect())"
    )
    return box[0] + share * box[2], box[1] + box[3] / 2


def test_a_zoom_shows_less_and_can_be_undone_in_three_ways(busy: Scene):
    page = shown_at(busy, 1440, "dark")
    assert page.value(RANGE).startswith("the last ")
    left, y = middle(page, "time-draft", 0.5)
    right, _ = middle(page, "time-draft", 0.75)

    def undone_by(act: str) -> None:
        page.wait_until(f"{RANGE}.startsWith('the last ')")
        page.drag(left, right, y)
        page.wait_until(f"{RANGE}.includes(' to ')")
        assert page.value("document.getElementById('zoom-out').hidden") is False
        # Both charts have the same range of time.
        times = page.value("looks.all('.chart canvas').slice(0, 2).map(looks.times)")
        assert len(times[0]) >= 2
        assert times[0] == times[1]
        page.value(act)
        page.wait_until(f"{RANGE}.startsWith('the last ')")
        assert page.value("document.getElementById('zoom-out').hidden") is True

    undone_by("document.getElementById('zoom-out').click()")
    undone_by(
        "document.querySelector('#time-load .u-over').dispatchEvent(new MouseEvent('dblclick'))"
    )
    page.value("document.getElementById('time-load').focus()")
    page.press("+")
    page.wait_until(f"{RANGE}.includes(' to ')")
    page.press("Escape")
    page.wait_until(f"{RANGE}.startsWith('the last ')")
    page.value("document.querySelector('[data-seconds=\"60\"]').click()")
    page.wait_until(f"{RANGE} === 'the last 60 s'")
    page.value("document.querySelector('[data-seconds=\"600\"]').click()")


def is_between_values(gap: str, values: list[str]) -> bool:
    """Whether there is a gap with a value before and another one after it."""
    kinds = [is_gap for is_gap, _ in groupby(values, lambda value: value == gap)]
    return sum(not is_gap for is_gap in kinds) >= 2


def test_the_keyboard_reads_the_past_and_a_gap_has_no_value(busy: Scene):
    page = shown_at(busy, 1440, "light")
    page.value("document.getElementById('time-draft').focus()")
    seen: list[tuple[str, str]] = []
    # The pause of the engine lies between two stretches with values.
    while not (
        is_between_values("–", [gamma for _, gamma in seen])
        and len({time_ms for time_ms, _ in seen}) > 5
    ):
        assert len(seen) < STOPS_MAX, seen
        page.press("ArrowLeft")
        seen.append((page.value(TIME_SHOWN), page.value(GAMMA)))
    aloud = page.value("document.getElementById('time-aloud').textContent")
    assert aloud.startswith(seen[-1][0].removeprefix("values at "))
    assert f"draft length γ, eagle3 {seen[-1][1]}, tokens per step τ " in aloud
    times = [time_ms for time_ms, _ in seen]
    assert all(time_ms.startswith("values at ") for time_ms in times)
    assert len(set(times)) > 5
    page.value("document.activeElement.blur()")
    page.wait_until(f"{TIME_SHOWN}.startsWith('newest values, ')")


def test_a_second_without_a_report_and_missing_seconds_are_gaps(scene: Scene):
    points = [
        [100, 4, 3, 0, 2.5, 900, 0], [101, None, 3, 0, None, None, None],
        [102, 8, 5, 1, 3.5, 800, 0.5], [150, 8, 5, 1, 3.5, 700, 0],
    ]  # fmt: skip
    columns = scene.page.value(
        f"import('/time.js').then(it => it.columns({points}, ['a', 'b']))".replace("None", "null")
    )
    times, first, second, tau, batch, rate, alone = columns
    assert times == [99, 100, 100, 101, 101, 102, 126, 149, 150]
    assert first == [3, 3, *[None] * 7]
    assert second == [None, None, None, None, 5, 5, None, 5, 5]
    assert tau == [2.5, 2.5, None, None, 3.5, 3.5, None, 3.5, 3.5]
    assert batch == [4, 4, None, None, 8, 8, None, 8, 8]
    assert rate == [900, 900, None, None, 800, 800, None, 700, 700]
    assert alone == [0, 0, None, None, 1, 1, None, 0, 0]
