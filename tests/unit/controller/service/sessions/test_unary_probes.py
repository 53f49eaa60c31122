from controller.core.engine_spec import Arm
from controller.core.plan import Probe
from controller.service.sessions.measurements import UnaryProbes
from controller.wire.reports import report_from_proto
from tests.support.service_harness import report_message

PROBE = Probe(7, Arm("mtp", 2), 2)


def test_a_probe_is_run_for_its_steps_and_never_again():
    probes = UnaryProbes()
    assert [probes.take_step(PROBE) for _ in range(4)] == [True, True, False, False]
    assert probes.take_step(Probe(8, Arm("mtp", 2), 1))


def test_the_report_after_a_probe_carries_its_id_once():
    probes = UnaryProbes()
    report = report_from_proto(report_message(1))
    assert probes.add_probe_id(report).probe_id == 0
    probes.take_step(PROBE)
    assert probes.add_probe_id(report).probe_id == 7
    assert probes.add_probe_id(report).probe_id == 0


def test_a_client_that_ran_something_else_or_knows_its_probe_is_believed():
    probes = UnaryProbes()
    probes.take_step(PROBE)
    other = report_message(1, gamma=0, accepted_counts=[4])
    assert probes.add_probe_id(report_from_proto(other)).probe_id == 0
    probes.take_step(PROBE)
    report = report_from_proto(report_message(1, probe_id=3))
    assert probes.add_probe_id(report).probe_id == 3
