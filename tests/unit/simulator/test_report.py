"""What is shown is what was found: nothing lost, nothing executable, nothing to fetch."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.cli.output import print_table, print_wrapped
from simulator.errors import InvalidInputError
from simulator.report.bars import judge_bars
from simulator.report.html import render_html
from simulator.report.text import render_text
from simulator.results import (
    Latency,
    PolicyOrigin,
    PolicyReport,
    ScenarioReport,
    SimulationReport,
    Spread,
    SustainedLoad,
    Timeline,
    from_json,
    to_json,
)

LINE = Timeline(
    (1.0, 2.0), (1.0, 4.0), (3.0, 0.0), (90.0, 80.0), (1.0, 2.0), (3.0, 1.0), (95.0, 85.0)
)


def policy(name="controller", origin=PolicyOrigin.OURS, oracle=0.995, **changes):
    base = PolicyReport(
        name, origin, 1000.0, 1000.0, oracle, 1.1, 1.5, (0.98, 1.0), None, None, 12.0, 20.0, 0.004,
        0.11, 5.0, 40.0, None, {"tide": 1.05} if origin is PolicyOrigin.OURS else {},
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def scenario(name="traffic", *policies, shifting=True, group="shifting", timeline=None):
    shown = policies or (policy(), policy("tide", PolicyOrigin.RESTATED, 0.94))
    return ScenarioReport(name, group, "words", shifting, 100, 3, "static-3", shown, timeline)


def report(*scenarios):
    return SimulationReport("controller simulate", "1.0", 7, 12.5, scenarios)


numbers = st.floats(0.01, 100.0)
spreads = st.builds(Spread, numbers, numbers, numbers)
policies = st.builds(
    PolicyReport, st.text(max_size=20), st.sampled_from(PolicyOrigin), numbers, numbers, numbers,
    numbers, st.none() | numbers, st.none() | st.tuples(numbers, numbers), st.none(), st.none(),
    numbers, st.none() | numbers, numbers, numbers, numbers, numbers,
    st.none() | st.builds(Latency, spreads, spreads, spreads),
    st.dictionaries(st.text(max_size=8), numbers),
)  # fmt: skip
scenarios = st.builds(
    ScenarioReport, st.text(max_size=20), st.text(max_size=9), st.text(max_size=9), st.booleans(),
    st.integers(1, 99), st.integers(1, 9), st.text(max_size=9), st.tuples(policies, policies),
    st.none() | st.just(LINE), st.booleans(),
    st.tuples(st.builds(SustainedLoad, st.text(max_size=9), numbers, numbers)),
)  # fmt: skip


@given(st.lists(scenarios, max_size=4))
@settings(max_examples=60, deadline=None)
def test_json_comes_back_as_it_went(scenario_reports):
    there = report(*scenario_reports)
    assert from_json(to_json(there)) == there


def test_json_has_the_agreed_shape_and_only_finite_numbers():
    there = report(scenario("x", policy(ratio_to_off=None, tokens_per_second=float("nan"))))
    body = json.loads(to_json(there), parse_constant=pytest.fail)
    first = body["scenarios"][0]["policies"][0]
    assert first["name"] == "controller"
    assert {"tokens_per_second", "ratio_to_oracle", "ratio_to_best_static", "ratio_to_off",
            "switches_per_1000_steps"} <= set(first)  # fmt: skip
    assert first["tokens_per_second"] is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"scenarios": 3}', "\x00"])
def test_anything_else_is_refused_in_one_line(text):
    with pytest.raises(InvalidInputError) as caught:
        from_json(text)
    assert "\n" not in str(caught.value)


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in {"src", "href", "xlink:href"} and v]


@pytest.fixture(scope="module")
def page():
    return render_html(
        report(
            scenario("<script>alert(1)</script>", timeline=LINE),
            scenario("still", shifting=False, group="stationary"),
            scenario("stationary/h100/alpha=0.7/B=8", shifting=False, group="stationary"),
        )
    )


def test_names_are_words_and_never_markup(page):
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_page_fetches_nothing(page):
    reader = Reader()
    reader.feed(page)
    assert "script" not in reader.tags
    assert "link" not in reader.tags
    assert all(link.startswith(("#", "data:")) for link in reader.links)
    assert page.count("<svg") >= 3


def test_an_empty_report_is_shown_as_such():
    assert list(render_text(report())) == ["no scenario was run"]
    assert "<h1>" in render_html(report())


@pytest.fixture
def text_of(capsys, monkeypatch):
    """What a terminal of a width shows."""

    def shown(there, width):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        for part in render_text(there):
            if isinstance(part, str):
                print_wrapped(part)
            else:
                print_table(part)
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)

    return shown


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("count", [1, 30])
def test_tables_fit_any_terminal(width, count, text_of):
    there = report(*[scenario(f"traffic/{i}") for i in range(count)])
    shown = text_of(there, width)
    assert max(map(len, shown.splitlines())) <= width


def bar(there, name):
    return next(b for b in judge_bars(there) if b.name.startswith(name))


def test_bars_hold_at_their_border_and_not_below():
    def still(value):
        return report(scenario("s", policy(oracle=value), shifting=False, group="stationary"))

    assert bar(still(0.98), "stationary: worst").holds
    assert not bar(still(0.9799), "stationary: worst").holds
    assert not bar(still(0.9899), "stationary: mean").holds
    assert bar(still(0.99), "stationary: mean").holds


def test_to_beat_is_more_than_to_equal():
    def moving(static, peer):
        ours = policy(ratio_to_best_static=static, ratio_to_peers={"tide": peer, "x": 2.0})
        return report(scenario("m", ours))

    assert not bar(moving(1.0, 1.0), "shifting: against the best static").holds
    assert bar(moving(1.001, 1.0), "shifting: against the best static").holds
    assert not bar(moving(1.1, 1.0), "shifting: against the best peer").holds
    assert "tide" in bar(moving(1.1, 1.0), "shifting: against the best peer").worst_scenario


def test_the_worst_scenario_is_named():
    there = report(scenario("good"), scenario("bad", policy(oracle=0.9)))
    bar_result = bar(there, "shifting: against the oracle")
    assert (bar_result.value, bar_result.worst_scenario, bar_result.holds) == (0.9, "bad", False)


def test_without_the_controller_there_are_no_bars():
    assert judge_bars(report(scenario("x", policy("tide", PolicyOrigin.RESTATED)))) == ()


LATENCY = Latency(Spread(0.0101, 0.0102, 0.0303), Spread(0.0044, 0.0045, 0.0066), Spread(1, 2, 3.5))


def test_latencies_and_sustained_loads_are_shown_where_there_are_any(text_of):
    loads = (SustainedLoad("tide", 3.25, 400.0), SustainedLoad("controller", 4.75, 600.0))
    open_loop = dataclasses.replace(
        scenario("arrivals", policy(latency=LATENCY)), open_loop=True, sustained=loads
    )
    text, page = text_of(report(open_loop), 200), render_html(report(open_loop))
    for shown in ("10.10 / 10.20 / 30.30", "4.40 / 4.50 / 6.60", "1.00 / 2.00 / 3.50",
                  "4.75", "11.00%"):  # fmt: skip
        assert shown in text
        assert shown in page
    assert text.index("4.75") < text.index("3.25")
    closed = report(scenario("closed"))
    assert "latency, mean" not in text_of(closed, 200)
    assert "sustained" not in text_of(closed, 200) + render_html(closed)
