"""A sidecar that is broken or hostile: real agent process, real gRPC server."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.messages import SidecarState
from engine_shim.link.plan_follower import Source
from engine_shim.link.settings import LinkSettings
from lab.harness.scripted_sidecar import ScriptedSidecar
from speculation.v1.plan_pb2 import Plan, PlanRow, Probe, Regime
from speculation.v1.service_pb2 import ReportRejection, SteerResponse
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec, plan

TOP = 2**32 - 1
# Longer than a busy machine holds up the test between a plan and a look at it.
LEASE_MAX_SECONDS = 60.0
SHORT_LEASE_SECONDS = 1.0
AGENT_BYTES = 64 * 1024 * 1024


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    with ScriptedSidecar(f"unix:{tmp_path}/s.sock", plans_once=True) as running:
        yield running


@contextmanager
def steered_by(
    sidecar: ScriptedSidecar, lease_max_seconds: float = LEASE_MAX_SECONDS
) -> Iterator[EngineLink]:
    settings = LinkSettings(
        sidecar=sidecar.target, grace_seconds=0.2, lease_max_seconds=lease_max_seconds
    )
    with closing(EngineLink.start(engine_spec(), settings, startup_gamma=1)) as link:
        yield link


def waits_for(link: EngineLink, source: Source, what: str) -> None:
    eventually(lambda: link.choose(4).source is source, description=what)


def test_an_engine_falls_back_in_bounded_time_whatever_lease_it_was_given(sidecar: ScriptedSidecar):
    sidecar.first_plan = lambda: plan(1, 2, lease_ms=TOP)
    with steered_by(sidecar, SHORT_LEASE_SECONDS) as link:
        waits_for(link, Source.PLAN, "steered")
        assert link.status().lease_seconds_left <= SHORT_LEASE_SECONDS
        sidecar.stop()
        waits_for(link, Source.SAFE_DEFAULT, "the safe default")


def test_an_agent_notices_silence_however_long_the_lease_was(sidecar: ScriptedSidecar):
    sidecar.first_plan = lambda: plan(1, 2, lease_ms=TOP)
    with steered_by(sidecar, SHORT_LEASE_SECONDS) as link:
        waits_for(link, Source.PLAN, "steered")
        # No plan follows the first one: the agent introduces its engine again.
        eventually(lambda: len(sidecar.introductions) > 1, description="a new session")


@pytest.mark.parametrize(
    "bad",
    [
        Plan(),
        Plan(epoch=2, lease_ms=0, rows=[PlanRow(max_batch_size=4, drafter="eagle3", gamma=2)]),
        plan(2, 64),
        Plan(epoch=2, lease_ms=1000, rows=[PlanRow(max_batch_size=4, drafter="?", gamma=2)]),
        Plan(
            epoch=2,
            lease_ms=1000,
            rows=[PlanRow(max_batch_size=n, drafter="eagle3", gamma=2) for n in (8, 4)],
        ),
        Plan(
            epoch=2,
            lease_ms=1000,
            rows=[PlanRow(max_batch_size=n + 1, drafter="eagle3", gamma=2) for n in range(600)],
        ),
        plan(2, 2, probe=Probe(probe_id=1, drafter="eagle3", gamma=64, steps=3)),
        plan(2, 2, probe=Probe(probe_id=1, drafter="eagle3", gamma=2, steps=0)),
    ],
    ids=["empty", "no-lease", "gamma", "drafter", "order", "rows", "probe", "no-steps"],
)
def test_a_plan_that_cannot_be_run_is_not_and_the_next_one_is(sidecar: ScriptedSidecar, bad: Plan):
    with steered_by(sidecar) as link:
        waits_for(link, Source.PLAN, "steered")
        before = link.plan_follower.plan
        sidecar.push(bad)

        def refused() -> bool:
            link.poll()
            return link.status().packets_refused == 1

        eventually(refused, description="the plan is refused")
        sidecar.push(plan(3, 0))
        eventually(lambda: link.choose(4).epoch == 3, description="the plan after it")
        assert before is not None
        assert link.status().packets_refused == 1
        assert link.choose(4).gamma == 0


def test_numbers_at_their_top_harm_nothing(sidecar: ScriptedSidecar):
    probe = Probe(probe_id=2**64 - 1, drafter="eagle3", gamma=2, steps=TOP)
    row = PlanRow(max_batch_size=TOP, drafter="eagle3", gamma=2, probe=probe)
    regime = Regime(mode=99, stride=TOP)  # type: ignore[arg-type]  # unknown to this version
    sidecar.first_plan = lambda: Plan(
        epoch=2**64 - 1, rows=[row], lease_ms=TOP, regime=regime, draft_version=TOP
    )
    with steered_by(sidecar, SHORT_LEASE_SECONDS) as link:
        waits_for(link, Source.PLAN, "steered")
        assert link.plan_follower.update_stride(0.0) == 0
        sidecar.stop()
        waits_for(link, Source.SAFE_DEFAULT, "the safe default")


def test_messages_without_end_do_not_fill_the_agents_memory(sidecar: ScriptedSidecar):
    flood = [ReportRejection(step=1, code=3, message="x\x1b[31m\n" * 50)] * 1_000
    huge = plan(2, 2)
    huge.reason_detail = "x" * 900_000
    too_large = plan(3, 2)
    too_large.reason_detail = "x" * 8_000_000
    with steered_by(sidecar) as link:
        waits_for(link, Source.PLAN, "steered")
        agent = psutil.Process(link.status().agent_pid)
        before = agent.memory_info().rss
        for epoch in range(2, 40):
            huge.epoch = epoch
            sidecar.push(huge)
            sidecar.send(SteerResponse(rejections=flood))
        eventually(lambda: link.choose(4).epoch == 39, description="the last of them")
        sidecar.push(too_large)
        eventually(lambda: len(sidecar.introductions) > 1, description="a new session")
        assert agent.is_running()
        assert agent.memory_info().rss - before < AGENT_BYTES


def test_a_session_id_without_end_is_not_taken(sidecar: ScriptedSidecar):
    sidecar.session_id = "s" * 500_000
    with steered_by(sidecar) as link:
        eventually(
            lambda: (link.receive(), link.status().sidecar is SidecarState.AWAY)[1],
            description="the session is unknown",
        )
        assert link.choose(4).source is Source.SAFE_DEFAULT
        sidecar.session_id = ""
        waits_for(link, Source.PLAN, "steered")
