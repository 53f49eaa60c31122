"""The sidecar with a script waits for the reports of all rows that an engine counts."""

from pathlib import Path
from threading import Timer

from lab.harness.scripted_sidecar import ScriptedSidecar
from speculation.v1.engine_pb2 import RowGroup, StepReport
from speculation.v1.service_pb2 import SteerRequest


def test_a_row_that_had_ended_stands_for_no_other(tmp_path: Path) -> None:
    """Two rows are waited for; the second comes in a report that is late."""
    one = StepReport(step=1, batch_size=1, accepted_counts=[1])
    ended = RowGroup(drafter="eagle3", accepted_counts=[1], ended=True)
    gone = StepReport(step=2, batch_size=1, accepted_counts=[1], groups=[ended])
    last = StepReport(step=3, batch_size=1, accepted_counts=[1])
    with ScriptedSidecar(f"unix:{tmp_path}/s.sock", plans_once=True) as server:
        server.requests.append(SteerRequest(reports=[one, gone]))
        late = Timer(0.2, server.requests.append, [SteerRequest(reports=[last])])
        late.start()
        reports = server.reports_since(0, 2)
        late.join()
    assert [report.step for report in reports] == [1, 2, 3]
