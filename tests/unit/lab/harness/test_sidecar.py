"""Against the real `controller serve`, in its own process, with an engine that only talks."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest

from lab.harness import engines
from lab.harness.engines import Workplace
from lab.harness.errors import HarnessError
from lab.harness.sidecar import SidecarHandle, count_decoded_rows, count_tokens
from speculation.v1 import engine_pb2, plan_pb2, service_pb2, service_pb2_grpc
from tests.support.eventually import eventually

ENGINE_ID = "demo"


@dataclass
class Talker:
    """An engine as far as the sidecar can tell."""

    speculation: service_pb2_grpc.SpeculationServiceStub
    session_id: str = ""
    step: int = 0

    def introduce(self) -> None:
        spec = engine_pb2.EngineSpec(
            engine_id=ENGINE_ID,
            fingerprint=engine_pb2.Fingerprint(target_model="t", engine="sglang"),
            drafters=[
                engine_pb2.Drafter(
                    name="eagle3", kind=engine_pb2.DRAFTER_KIND_MTP, gammas=[0, 1, 3]
                )
            ],
            max_batch_size=16,
        )
        reply = self.speculation.Introduce(
            service_pb2.IntroduceRequest(engine=spec, engine_secret="its own")
        )
        self.session_id = reply.session_id

    def report(self, gamma: int, batch_size: int, *, unsteered: bool = False) -> None:
        self.step += 1
        self.speculation.Decide(
            service_pb2.DecideRequest(
                session_id=self.session_id,
                report=engine_pb2.StepReport(
                    step=self.step,
                    batch_size=batch_size,
                    kv_tokens=100 * batch_size,
                    drafter="eagle3",
                    gamma=gamma,
                    accepted_counts=[batch_size] + [0] * gamma,
                    step_seconds=0.01,
                    flags=engine_pb2.StepFlags(unsteered=unsteered),
                ),
            )
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = Workplace(tmp_path_factory.mktemp("output"), tmp_path_factory.mktemp("s"))
    with (
        engines.launch_sidecar(place) as child,
        SidecarHandle(place.address, ENGINE_ID) as sidecar,
    ):
        engines.wait_serving(child, sidecar)
        yield place


@pytest.fixture
def talker(place: Workplace) -> Iterator[Talker]:
    with grpc.insecure_channel(place.address) as channel:
        talker = Talker(service_pb2_grpc.SpeculationServiceStub(channel))
        talker.introduce()
        yield talker


@pytest.fixture
def sidecar(place: Workplace) -> Iterator[SidecarHandle]:
    with SidecarHandle(place.address, ENGINE_ID) as sidecar:
        yield sidecar


def test_rows_that_had_ended_made_no_tokens():
    report = engine_pb2.StepReport(
        batch_size=3,
        gamma=2,
        accepted_counts=[1, 1, 1],
        groups=[
            engine_pb2.RowGroup(drafter="eagle3", gamma=2, accepted_counts=[0, 1, 1]),
            engine_pb2.RowGroup(drafter="eagle3", gamma=0, accepted_counts=[1], ended=True),
        ],
    )
    assert (count_decoded_rows(report), count_tokens([report, report])) == (2, 10)


def gammas_of(sidecar: SidecarHandle) -> set[int]:
    return {row.gamma for row in sidecar.status().plan.rows}


def test_pinned_means_this_draft_length_everywhere_and_afterwards_planning_again(talker, sidecar):
    with sidecar.pinned(3):
        assert gammas_of(sidecar) == {3}
        assert sidecar.status().plan.reason == plan_pb2.REASON_PROFILING
    eventually(lambda: sidecar.status().plan.reason != plan_pb2.REASON_PROFILING)
    with sidecar.pinned(1):
        assert gammas_of(sidecar) == {1}


def test_a_pin_moves_and_hands_over_what_ran(talker, sidecar):
    with sidecar.pinned(3) as pin:
        talker.report(gamma=3, batch_size=2)
        pin.move(1)
        eventually(lambda: gammas_of(sidecar) == {1})
        talker.report(gamma=1, batch_size=4)
        eventually(lambda: len(pin.reports) == 2)
    assert [(report.gamma, report.batch_size) for report in pin.reports] == [(3, 2), (1, 4)]


def test_reports_that_are_still_on_their_way_are_waited_for(talker, sidecar):
    with sidecar.pinned(3) as pin:
        talker.report(gamma=3, batch_size=2)
        first = len(pin.reports_since(0, 2))
        late = threading.Timer(0.5, talker.report, kwargs={"gamma": 3, "batch_size": 4})
        late.start()
        late_reports = pin.reports_since(first, 4)
        late.join()
    assert [report.batch_size for report in late_reports] == [4]


def test_reports_that_never_come_are_an_error(talker, sidecar, monkeypatch):
    monkeypatch.setattr("lab.harness.sidecar._REPORTS_SECONDS", 0.1)
    with sidecar.pinned(3) as pin, pytest.raises(HarnessError, match="demo reported 0 of 2 tokens"):
        pin.reports_since(0, 2)


def test_a_step_makes_a_token_of_the_target_beside_the_accepted_drafts():
    reports = [
        engine_pb2.StepReport(accepted_counts=[2, 1, 0, 1]),
        engine_pb2.StepReport(accepted_counts=[3]),
    ]
    assert count_tokens(reports) == (2 + 2 + 4) + 3
    assert not count_tokens([])


def test_a_draft_length_that_the_engine_lacks_is_refused(talker, sidecar):
    with pytest.raises(HarnessError, match="does not pin eagle3 gamma 2"), sidecar.pinned(2):
        pass
