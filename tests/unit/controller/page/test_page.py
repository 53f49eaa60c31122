"""The page in a real browser, beside a real sidecar that steers a real agent."""

import re
from pathlib import Path

from controller.core.plan import Reason
from controller.wire.override_text import PRECEDENCE
from tests.support.sidecar_process import controller, sidecar_process
from tests.unit.controller.page.conftest import HOSTILE, LONG, ROW, Scene

PAGE = Path(__file__).parents[4] / "controller" / "page"


def test_it_shows_the_steered_engine_and_follows_its_batch(scene: Scene):
    page = scene.page
    scene.run_until(f"{scene.cell('pod-7', 'batch')} === '4'", 4)
    assert "with eagle3" in page.value(scene.cell("pod-7", "runs now"))
    scene.run_until(f"{scene.cell('pod-7', 'state')} === 'steered'", 4)
    scene.run_until(f"Number({scene.cell('pod-7', 'tokens/step')}) > 1", 4)
    scene.run_until(f"parseInt({scene.cell('pod-7', 'tokens/s')}) > 0", 4)
    scene.run_until(f"{scene.cell('pod-7', 'batch')} === '23'", 23)
    assert page.value("document.getElementById('live').textContent") == "live"
    assert page.value("document.getElementById('stale').hidden") is True


def test_the_first_thing_it_says_is_what_runs_since_when_and_why(scene: Scene):
    page = scene.page
    scene.run_until("/^Drafts \\d tokens? per step with eagle3$/.test(doing.textContent)", 23)
    assert page.value("document.getElementById('engine-title').textContent") == "pod-7"
    scene.run_until("/^(since|for more)/.test(since.textContent)", 23)
    scene.run_until("why.textContent.includes('no cost profile of this engine is loaded')", 23)
    assert page.value("held.textContent") == "No override shapes this plan."
    assert page.value("link.textContent") == "steered"
    # It stands above every chart.
    above = "doing.getBoundingClientRect().bottom < time.getBoundingClientRect().top"
    assert page.value(above)


def test_every_reason_has_plain_words(scene: Scene):
    words = scene.page.value("import('/words.js').then(it => Object.keys(it.REASONS))")
    assert {reason.value for reason in Reason} <= set(words)


def test_an_engine_that_cannot_be_shown_is_not_said_to_run_without_speculation(scene: Scene):
    line = "{ unavailable: 'explain failed', gamma: 0, drafter: '' }"
    text = scene.page.value(f"import('/words.js').then(it => it.runsNow({line}))")
    assert text == "cannot be shown"


def test_it_draws_history_costs_survival_and_reasons(scene: Scene):
    page = scene.page
    for chart, curves in (("time-draft", 2), ("time-load", 3), ("survival", 1)):
        scene.run_until(f"document.querySelectorAll('#{chart} canvas').length === 1", 23)
        samples = f"document.querySelectorAll('#{chart} + .legend .swatch').length"
        assert page.value(samples) == curves
        assert page.value(f"document.getElementById('{chart}').ariaLabel")
    # 6 draft lengths, a best one for every batch size, and one that runs.
    columns = page.value("document.querySelectorAll('.heat thead th').length") - 1
    assert page.value("document.querySelectorAll('.heat tbody tr').length") == 6
    assert page.value("document.querySelectorAll('.heat .frontier:not(.swatch)').length") == columns
    assert page.value("document.querySelectorAll('.heat .now').length") == 1
    scene.run_until("document.querySelector('.heat .now').title.includes(' at B 23: ')", 23)
    assert "runs now" in page.value("document.querySelector('.heat .now').ariaLabel")
    assert page.value("document.querySelectorAll('.heat td.guess').length") == 6 * columns
    scene.run_until(
        "/^0\\.\\d\\d at 7$/.test(document.querySelector('#survival + .legend b').textContent)", 4
    )
    scene.run_until("document.querySelectorAll('#trail li time').length > 0", 4)


def test_it_compares_the_plan_with_every_choice_held_fixed(scene: Scene):
    page = scene.page
    scene.run_until("document.querySelectorAll('#alternatives tbody tr').length === 7", 4)
    rows = page.value(
        "[...document.querySelectorAll('#alternatives tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert rows[0][0] == "the plan, as it changed"
    assert {row[0] for row in rows[1:]} == {
        "always no speculation", *(f"always γ {gamma} with eagle3" for gamma in (1, 2, 3, 5, 7))
    }  # fmt: skip
    assert all(float(row[2].replace(",", "")) > 0 for row in rows)
    rates = [float(row[2].replace(",", "")) for row in rows[1:]]
    assert rates == sorted(rates, reverse=True)
    assert "The plan was measured at " in page.value(
        "document.getElementById('alternatives-note').textContent"
    )


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
        ("--engine", "pod-7", "--off", "--permanent"),
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
    assert fleet[5].startswith(("in 2.0 h", "in 120 min"))
    assert mine[1] == "no speculation"
    assert mine[5] == "never"
    scene.run_until(f"{scene.cell('pod-7', 'runs now')} === 'no speculation'", 4)
    scene.run_until(f"{scene.cell('pod-7', 'overrides')}.includes('{fleet[6]}')", 4)
    # What holds for the engine stands beside what it does.
    scene.run_until("held.querySelectorAll('p').length === 2", 4)
    text = page.value("held.textContent")
    assert "Override: no speculation by " in text
    assert HOSTILE in text
    assert page.value("doing.textContent") == "No speculation (γ = 0)"
    # What is forbidden is faint: of six draft lengths only gamma = 0 is left.
    scene.run_until(
        "[...document.querySelectorAll('.heat tbody tr')]"
        ".filter(row => row.querySelector('.off')).length === 5",
        4,
    )
    assert page.value("document.querySelectorAll('td.off.frontier').length") == 0


def test_the_keyboard_is_enough(scene: Scene):
    page = scene.page
    page.open(f"{scene.origin}/?from-its-top")
    page.wait_until(f"{ROW.format(LONG)} !== null")
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
    page.wait_until(f"document.getElementById('engine-title').textContent === {LONG!r}")
    assert page.value("document.activeElement.dataset.engine") == LONG
    assert page.value(f"{ROW.format(LONG)}.getAttribute('aria-selected')") == "true"
    assert page.value(f"{ROW.format('pod-7')}.getAttribute('aria-selected')") == "false"
    page.wait_until(f"document.getElementById('facts').textContent.includes({HOSTILE!r})")
    page.wait_until(
        f"document.querySelector('.heat th[scope=row]').textContent.includes({HOSTILE!r})"
    )
    page.press("ArrowDown")
    assert page.value("document.activeElement.dataset.engine") == LONG
    page.press("Home")
    page.wait_until("document.getElementById('engine-title').textContent === 'pod-7'")
    page.press("End")
    page.wait_until(f"document.getElementById('engine-title').textContent === {LONG!r}")
    assert page.value("document.images.length") == 1
    assert page.value("window.hurt === undefined")
    page.press("ArrowUp")
    page.wait_until("document.getElementById('engine-title').textContent === 'pod-7'")


def test_everything_that_is_shown_has_a_name(scene: Scene):
    nameless = scene.page.value(
        "[...document.querySelectorAll('button, a, table, svg[role=img], section, [tabindex]')]"
        ".filter(e => !(e.ariaLabel || e.getAttribute('aria-labelledby') || e.innerText))"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []


def test_it_is_light_or_dark_as_the_system_says_or_as_told(scene: Scene):
    page = scene.page
    ground = "getComputedStyle(document.body).backgroundColor"
    page.prefer(prefers_color_scheme="light")
    page.wait_until("document.documentElement.dataset.theme === 'light'")
    light = page.value(ground)
    page.prefer(prefers_color_scheme="dark")
    page.wait_until("document.documentElement.dataset.theme === 'dark'")
    assert page.value(ground) != light
    page.value("document.getElementById('theme').focus()")
    page.press("Enter")
    assert page.value("document.getElementById('theme').ariaLabel") == "Colours: light"
    assert page.value(ground) == light
    page.open(f"{scene.origin}/?again")
    page.wait_until("document.documentElement.dataset.theme === 'light'")
    page.value("document.getElementById('theme').focus()")
    page.press("Enter")
    page.press("Enter")
    assert page.value("document.documentElement.dataset.theme") == "dark"
    page.wait_until(ROW.format("pod-7") + " !== null")


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


def test_no_script_that_came_with_markup_would_run(scene: Scene):
    text = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=|javascript:", text) == []
    scene.page.value(
        "(it => { it.textContent = 'window.hurt = 1'; document.body.append(it); it.remove(); })"
        "(document.createElement('script'))"
    )
    assert scene.page.value("window.hurt === undefined")
    # The browser says which rule has stopped it.
    assert all("Content Security Policy" in problem for problem in scene.page.problems)
    assert len(scene.page.problems) == 1
    scene.page.problems.clear()


def test_it_says_since_when_it_is_stale_and_recovers(scene: Scene):
    page = scene.page
    scene.sidecar.stop()
    page.wait_until("!document.getElementById('stale').hidden")
    text = page.value("document.getElementById('stale').textContent")
    assert text.startswith("Stale since ")
    assert page.value("document.getElementById('live').textContent") == "stale"
    # What was known stays.
    assert page.value(scene.cell("pod-7", "runs now")) == "no speculation"
    scene.processes.enter_context(
        sidecar_process(scene.directory, "--page-port", str(scene.port), "--ready-with", "guess")
    )
    page.wait_until("document.getElementById('stale').hidden")
    page.wait_until("document.getElementById('live').textContent === 'live'")
    scene.engine.wait_for_a_plan()
    page.wait_until(f"{ROW.format('pod-7')} !== null")
    page.wait_until(f"{ROW.format(LONG)} === null")
