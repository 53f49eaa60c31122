"""What travels on the socket pair is read as written, and nothing else is taken for it."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.link.errors import PacketError
from engine_shim.link.messages import (
    MAX_TEXT_BYTES,
    PURE_PYTHON_VARIABLE,
    REQUEST,
    ArrivedPlan,
    SidecarState,
    encode_plan,
    encode_report_field,
    encode_state,
    read_introduction,
    read_packet,
    read_request,
    table_digest,
)
from speculation.v1.engine_pb2 import StepReport
from speculation.v1.link_pb2 import LinkState
from speculation.v1.service_pb2 import IntroduceRequest, SteerRequest
from tests.support.link_messages import engine_spec, plan
from tests.support.step_reports import step_report

READERS = [read_packet, read_introduction, read_request]


@given(
    st.lists(st.builds(StepReport, step=st.integers(0, 2**64 - 1), drafter=st.text(max_size=300))),
    st.integers(0, 2**64 - 1),
)
def test_reports_go_unread_into_a_message_of_all(reports: list[StepReport], dropped: int):
    request = SteerRequest(session_id="s", dropped_reports=dropped)
    fields = [encode_report_field(report.SerializeToString()) for report in reports]
    whole = SteerRequest.FromString(b"".join((request.SerializeToString(), *fields)))
    request.reports.extend(reports)
    assert whole == request


@pytest.mark.parametrize("size", [0, 1, 0x7F, 0x80, 0x3FFF, 0x4000, 64 * 1024])
def test_a_report_of_any_size_is_one_field(size: int):
    report = StepReport(drafter="x" * size)
    (decoded_report,) = SteerRequest.FromString(
        encode_report_field(report.SerializeToString())
    ).reports
    assert decoded_report == report


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1))
def test_a_plan_comes_back_as_it_was_sent(arrival_ns: int, digest: int):
    sent = ArrivedPlan(plan(7, 3), arrival_ns, digest)
    assert read_packet(encode_plan(sent)) == sent


@given(st.sampled_from(SidecarState), st.integers(0, 2**16 - 1), st.text(max_size=400))
def test_a_state_comes_back_with_its_text_cut_to_the_limit(state, code, text):
    decoded_state = read_packet(encode_state(state, code, text))
    assert isinstance(decoded_state, LinkState)
    assert (SidecarState(decoded_state.state), decoded_state.code) == (state, code)
    whole = text.encode("utf-8", "replace").decode()
    assert whole.startswith(decoded_state.text)
    assert len(decoded_state.text.encode()) <= MAX_TEXT_BYTES
    if len(whole.encode()) <= MAX_TEXT_BYTES:
        assert decoded_state.text == whole


@pytest.mark.parametrize("read", READERS)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_a_packet_error(read, data):
    try:
        read(data)
    except PacketError:
        return


@pytest.mark.parametrize("read", READERS)
def test_the_beginnings_of_other_packets_are_none(read):
    introduction = IntroduceRequest(engine=engine_spec()).SerializeToString()
    packets = {
        read_packet: encode_plan(ArrivedPlan(plan(7, 3), 5)),
        read_introduction: introduction,
        read_request: REQUEST + SteerRequest(dropped_reports=1).SerializeToString(),
    }
    assert read(packets[read])
    with pytest.raises(PacketError):
        read(b"")
    with pytest.raises(PacketError):
        read(REQUEST + SteerRequest(reports=[step_report(1)]).SerializeToString())


def test_a_digest_is_of_the_rows_and_rules_alone():
    one, renewed = plan(1, 3), plan(2, 3, lease_ms=9)
    renewed.session, renewed.draft_version, renewed.reason_detail = 4, 5, "renewed"
    assert table_digest(one) == table_digest(renewed)
    assert table_digest(plan(1, 5)) != table_digest(one)
    renewed.rules.add(drafter="eagle3", gamma=1)
    assert table_digest(renewed) != table_digest(one)


SCRIPT = """
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.errors import LinkStartError
from engine_shim.link.settings import LinkSettings
from engine_shim.common.checks import protobuf_check, require_no_obstacle
from engine_shim.common.errors import UnsupportedEngineError
from tests.support.link_messages import engine_spec
settings = LinkSettings(sidecar="unix:/nowhere.sock")
for start, error in (
    (lambda: EngineLink.start(engine_spec(), settings, 3), LinkStartError),
    (lambda: require_no_obstacle([protobuf_check()]), UnsupportedEngineError),
):
    try:
        start()
    except error as refusal:
        print(refusal)
"""


def test_an_engine_whose_protobuf_is_pure_python_does_not_start():
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        PURE_PYTHON_VARIABLE: "python",
    }
    run = [sys.executable, "-c", SCRIPT]
    output_lines = subprocess.check_output(run, text=True, env=environment).splitlines()
    assert len(output_lines) == 2
    assert all(f"unset {PURE_PYTHON_VARIABLE}" in line for line in output_lines)
