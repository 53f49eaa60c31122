"""Filters of the fleet: bounded, answered once for all who ask the same, and interruptible."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from controller.service.net.errors import InvalidQuestionError
from controller.service.net.limits import FairQueue
from controller.service.views import fleet_filter
from controller.service.views.fleet_filter import (
    FILTER_CHARACTERS_MAX,
    FILTER_WORDS_MAX,
    FleetSearch,
)
from controller.service.views.fleet_summary import EngineSummary
from controller.service.views.fleet_view import Fleet, FleetEngine, totals_of
from lab.harness.processes import free_port
from speculation.v1 import service_pb2
from tests.support.error_details import failure_details
from tests.support.service_harness import PATIENCE_SECONDS, running_sidecar, with_timeout

ENGINES = 2000


def engine(number: int) -> FleetEngine:
    summary = EngineSummary(
        engine_id=f"Engine-{number:05}",
        target_model="even" if number % 2 == 0 else "odd",
        batch_size=8,
        drafter="mtp",
        gamma=number % 4,
        link="steered",
        reason="exploit",
        seconds_since_report=0.5,
        overrides=("night",) if number == 7 else (),
        generated_per_second=10.0,
    )
    return FleetEngine("pod", f"{number % 3:x}", summary, 1.0)


def view(count: int = ENGINES) -> Fleet:
    return Fleet(tuple(engine(number) for number in range(count)), shared=True)


class Looked:
    """In the place of a FleetView: shows one fleet until another one is put in its place."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    async def current_view(self) -> Fleet:
        await asyncio.sleep(0)
        return self.fleet


@pytest.fixture
def fleets_selected(monkeypatch: pytest.MonkeyPatch) -> list[Fleet]:
    """The fleets that selections have been made of."""
    fleets: list[Fleet] = []
    select = fleet_filter._select_engines

    def counted(fleet: Fleet, matches: fleet_filter._Matches):
        fleets.append(fleet)
        return select(fleet, matches)

    monkeypatch.setattr(fleet_filter, "_select_engines", counted)
    return fleets


def search(looked: Looked) -> FleetSearch:
    return FleetSearch(looked, FairQueue(100))  # type: ignore[arg-type]  # all that it asks of a view


def ids(engines: Sequence[FleetEngine]) -> list[str]:
    return [one.summary.engine_id for one in engines]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", ENGINES),
        ("eNGine-", ENGINES),
        ("model=even", ENGINES // 2),
        ("model=even gamma=0 engine-0000", 3),
        ("nig", 1),
        ("override=night", 1),
        ("override=nig", 0),
        ("engine=engine-00001", 0),
        ("engine=Engine-00001 mtp odd pod", 1),
        # No word is looked for across two fields.
        ("pododd", 0),
    ],
)
async def test_a_filter_selects_what_all_words_match(text: str, count: int):
    looked = Looked(view())
    selection = await search(looked).select(text)
    assert len(selection.engines) == len(selection.keys) == count
    assert selection.totals == totals_of(selection.engines)


async def test_the_same_question_is_answered_once(fleets_selected: list[Fleet]):
    looked = Looked(view())
    asked = search(looked)
    selections = await asyncio.gather(*(asked.select("even") for _ in range(20)))
    assert len({id(one) for one in selections}) == len(fleets_selected) == 1
    await asked.select("odd")
    await asked.select("even")
    assert len(fleets_selected) == 2
    # Of other engines it is another question.
    looked.fleet = view(10)
    assert len((await asked.select("even")).engines) == 5
    assert len(fleets_selected) == 3


async def test_selections_that_are_kept_are_few():
    looked = Looked(view(10))
    asked = search(looked)
    for number in range(3 * fleet_filter._SELECTIONS_MAX):
        await asked.select(f"word-{number}")
    assert len(asked._selections) <= fleet_filter._SELECTIONS_MAX


async def test_a_page_follows_its_token():
    selection = await search(Looked(view(10))).select("even")
    assert ids(selection.engines_after("", 2)) == ["Engine-00000", "Engine-00002"]
    assert ids(selection.engines_after(selection.keys[1], 2)) == ["Engine-00004", "Engine-00006"]
    assert ids(selection.engines_after("Engine-00007", 5)) == ["Engine-00008"]
    assert not selection.engines_after("z", 5)


TOO_MUCH = {
    "words": " ".join("e" for _ in range(FILTER_WORDS_MAX + 1)),
    "characters": "e" * (FILTER_CHARACTERS_MAX + 1),
}


@pytest.mark.parametrize("what", TOO_MUCH)
async def test_a_filter_is_bounded(tmp_path: Path, what: str, fleets_selected: list[Fleet]):
    with pytest.raises(InvalidQuestionError, match=what):
        await search(Looked(view(1))).select(TOO_MUCH[what])
    port = free_port()
    async with running_sidecar(tmp_path, page_port=port) as running:
        request = service_pb2.ListFleetRequest(filter=TOO_MUCH[what])
        refusal = await failure_details(running.inspection.ListFleet(request))
        assert (refusal.field, refusal.reason) == ("filter", "INVALID_REQUEST")
        url = f"http://127.0.0.1:{port}/api/v1/fleet?filter={quote(TOO_MUCH[what])}"
        with pytest.raises(HTTPError) as error:
            await with_timeout(asyncio.to_thread(urlopen, url, timeout=PATIENCE_SECONDS))
        with error.value as answer:
            assert answer.code == 400
        request = service_pb2.ListFleetRequest(filter=" ".join("e" * FILTER_WORDS_MAX))
        await with_timeout(running.inspection.ListFleet(request))
    assert len(fleets_selected) == 1
