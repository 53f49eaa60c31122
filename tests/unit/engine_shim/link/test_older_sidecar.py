"""A sidecar that does not know mixtures steers an engine that has some, without them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from controller.core.errors import InvalidEngineError
from controller.wire import engines
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.losses import lost
from engine_shim.link.older_sidecar import reduced
from engine_shim.link.packets import ReportPacket, SidecarState
from engine_shim.link.plan_follower import Source
from engine_shim.link.settings import LinkSettings
from lab.harness.scripted_sidecar import ScriptedSidecar
from speculation.v1.engine_pb2 import (
    CAPABILITY_DRAFTER,
    CAPABILITY_SLEEP,
    DRAFTER_KIND_MIXTURE,
    DRAFTER_KIND_NGRAM,
    EngineSpec,
    Mixture,
)
from speculation.v1.service_pb2 import IntroduceRequest, IntroduceResponse
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec

# What the versions before mixtures answer.
REFUSAL = (
    "drafter 'eagle3+ngram': kind 5 is unspecified or not known here; known are mtp, dflash, "
    "standalone, ngram"
)
MAIN, LOOKUP, MIXTURE = 0, 1, 2
NAMES = ["eagle3", "ngram", "eagle3+ngram"]


def spec() -> EngineSpec:
    made = engine_spec()
    made.drafters.add(name="ngram", kind=DRAFTER_KIND_NGRAM, gammas=[1, 3])
    made.drafters.add(
        name="eagle3+ngram",
        kind=DRAFTER_KIND_MIXTURE,
        gammas=[1, 3],
        mixture=Mixture(main="eagle3", free="ngram"),
    )
    return made


class OlderSidecar(ScriptedSidecar):
    """Refuses an introduction with a mixture until it is upgraded."""

    def __init__(self, target: str) -> None:
        super().__init__(target, plans_once=True)
        self.upgraded = False
        self.refused = 0

    async def Introduce(self, request: IntroduceRequest, context: Any) -> IntroduceResponse:
        """Takes what it knows."""
        kinds = {drafter.kind for drafter in request.engine.drafters}
        if DRAFTER_KIND_MIXTURE in kinds and not self.upgraded:
            self.refused += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, REFUSAL)
        return await super().Introduce(request, context)

    def names(self) -> list[str]:
        """Of the drafters that were introduced last."""
        return [drafter.name for drafter in self.introductions[-1].drafters]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[OlderSidecar]:
    with OlderSidecar(f"unix:{tmp_path}/s.sock") as running:
        yield running


@pytest.fixture
def start_link(sidecar: OlderSidecar) -> Iterator[Callable[[EngineSpec], EngineLink]]:
    links: list[EngineLink] = []

    def start(introduced: EngineSpec) -> EngineLink:
        settings = LinkSettings(sidecar=sidecar.target, report_interval_ms=0)
        links.append(EngineLink.start(introduced, settings, startup_gamma=1))
        steered(links[-1])
        return links[-1]

    yield start
    for link in links:
        link.close()


def steered(link: EngineLink) -> None:
    eventually(lambda: link.choose(4).source is Source.PLAN, what="steered by a plan")


def report(step: int, drafter: int) -> ReportPacket:
    return ReportPacket(step, 4, 400, drafter, 3, (1, 1, 1, 1), 0.01, 0, 1, 0)


def test_the_engine_is_steered_without_its_mixtures_and_says_so(sidecar, start_link, capfd):
    link = start_link(spec())
    assert sidecar.names() == ["eagle3", "ngram"]
    assert sidecar.refused == 1
    status = link.status()
    assert status.sidecar is SidecarState.STEERING
    assert status.sidecar_detail.endswith(", which does not know eagle3+ngram")
    link.close()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if "{" in line]
    (said,) = [line for line in lines if line["event"] == "sidecar-older"]
    assert said["left_out"] == ["eagle3+ngram"]
    assert "upgrade it" in said["detail"]


def test_after_an_upgrade_all_drafters_are_introduced(sidecar, start_link):
    link = start_link(spec())
    sidecar.stop()
    sidecar.upgraded = True
    sidecar.start()
    eventually(lambda: sidecar.names() == NAMES, what="all are introduced")

    def knows_all() -> bool:
        link.poll()
        detail = link.status().sidecar_detail
        return detail.startswith("session") and "know" not in detail

    eventually(knows_all, what="the engine is informed")
    assert sidecar.refused == 1


def test_what_was_lost_of_a_mixture_is_not_told_and_all_else_is(sidecar, start_link):
    introduced = spec()
    introduced.lost.append(lost(CAPABILITY_DRAFTER, "no room", "eagle3+ngram"))
    introduced.lost.append(known := lost(CAPABILITY_DRAFTER, "no room", "ngram"))
    link = start_link(introduced)
    assert list(sidecar.introductions[-1].lost) == [known]
    link.lose(lost(CAPABILITY_DRAFTER, "it failed", "eagle3+ngram"))
    link.lose(sleep := lost(CAPABILITY_SLEEP, "it failed"))
    told = eventually(
        lambda: [loss for request in sidecar.requests for loss in request.lost], what="a loss"
    )
    assert set(map(str, told)) == {str(sleep)}


def test_a_report_of_a_mixture_from_before_is_counted_as_dropped(sidecar, start_link):
    """Of a newer sidecar's session, that is, after a roll-back."""
    link = start_link(spec())
    for step, drafter in ((1, MAIN), (2, MIXTURE), (3, LOOKUP)):
        assert link.report(report(step, drafter))
    eventually(lambda: len(sidecar.reports) == 2, what="the others arrive")
    assert [found.drafter for found in sidecar.reports] == ["eagle3", "ngram"]
    eventually(
        lambda: sum(request.dropped_reports for request in list(sidecar.requests)) == 1,
        what="it is counted",
    )


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "no gamma is listed"),
        (grpc.StatusCode.INVALID_ARGUMENT, "drafter 'eagle3': kind 7 is unspecified or not known"),
        (grpc.StatusCode.INVALID_ARGUMENT, "drafter 'eagle3+ngram': kind 0 is unspecified"),
        (grpc.StatusCode.PERMISSION_DENIED, REFUSAL),
    ],
)
def test_any_other_refusal_is_one(code: grpc.StatusCode, detail: str):
    assert reduced(spec(), code, detail) is None


def test_an_engine_without_mixtures_has_nothing_to_leave_out():
    assert reduced(engine_spec(), grpc.StatusCode.INVALID_ARGUMENT, REFUSAL) is None


def test_a_sidecar_of_today_would_refuse_a_kind_in_the_same_words(monkeypatch):
    known = {k: v for k, v in engines._KIND_FROM_PROTO.items() if k != DRAFTER_KIND_MIXTURE}
    monkeypatch.setattr(engines, "_KIND_FROM_PROTO", known)
    with pytest.raises(InvalidEngineError) as refused:
        engines.engine_from_proto(spec())
    less = reduced(spec(), grpc.StatusCode.INVALID_ARGUMENT, str(refused.value))
    assert less is not None
    assert less.left_out == ("eagle3+ngram",)
