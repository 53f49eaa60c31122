import math
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.link import packets
from engine_shim.link.errors import PacketError
from engine_shim.link.packets import PlanPacket, RowEntry, SidecarState
from tests.unit.engine_shim.link.strategies import GAMMAS, PLANS, UINT8, UINT32, UINT64

DECODERS: list[Callable[[bytes], object]] = [
    packets.decode_hello,
    packets.decode_report,
    packets.decode_plan,
    packets.decode_event,
    packets.decode_lost,
]
REPORT = packets.ReportPacket(1, 1, 1, 0, 3, (1, 0, 0, 0), 0.1, 0, 0, 0)
RULE = packets.RuleEntry(2, 3, 1.5, (0.5, 2.5), 2, 0.125)
ONE_ROW = PlanPacket(1, 1, 0, 1000, 1, 0, (RowEntry(8, 0, 3, asleep=False, probe=None),))


@given(PLANS)
def test_a_plan_comes_back_as_it_was_sent(plan: PlanPacket):
    assert packets.decode_plan(packets.encode_plan(plan)) == plan


@given(
    gamma=GAMMAS,
    data=st.data(),
    drafter=UINT8,
    flags=st.integers(0, packets.ALL_FLAGS),
    numbers=st.tuples(UINT64, UINT32, UINT64, UINT64, UINT64, UINT32, UINT32, UINT32, UINT32),
    seconds=st.floats(),
    update=st.floats(width=32, allow_nan=False),
    learnt=st.none() | st.integers(0, 2**32 - 2),
    delivered=st.none() | st.integers(0, 2**32 - 2),
)
def test_a_report_comes_back_as_it_was_sent(
    gamma, data, drafter, flags, numbers, seconds, update, learnt, delivered
):
    step, batch, kv, epoch, probe, session, dropped, version, prefill = numbers
    counts = data.draw(st.lists(UINT32, min_size=gamma + 1, max_size=gamma + 1))
    sent = packets.ReportPacket(
        step, batch, kv, drafter, gamma, tuple(counts), seconds, flags, epoch, probe, session,
        update, version, dropped, prefill, learnt_from=learnt,
        delivered_tokens=delivered,
    )  # fmt: skip
    packet = packets.encode_report(sent)
    report = packets.decode_report(packet)
    assert len(packet) == 78 + 4 * (gamma + 1)
    assert report.step_seconds == seconds or math.isnan(seconds)
    assert report._replace(step_seconds=0.0) == sent._replace(step_seconds=0.0)


@given(st.binary(max_size=1000))
def test_an_introduction_comes_back_as_it_was_sent(spec: bytes):
    assert packets.decode_hello(packets.encode_hello(spec)) == spec


@given(st.sampled_from(SidecarState), st.integers(0, 2**16 - 1), st.text(max_size=400))
def test_an_event_comes_back_with_its_text_cut_to_the_limit(state, code, text):
    event = packets.decode_event(packets.encode_event(state, code, text))
    assert (event.state, event.code) == (state, code)
    whole = text.encode("utf-8", "replace").decode()
    assert whole.startswith(event.text)
    if len(whole.encode()) <= packets.MAX_EVENT_TEXT_BYTES:
        assert event.text == whole


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_a_packet_or_a_packet_error(decode, data):
    try:
        decode(data)
    except PacketError:
        return


@pytest.mark.parametrize("kind", [packets.REPORT, packets.PLAN, packets.EVENT, packets.LOST])
@given(data=st.binary(max_size=400))
def test_arbitrary_bytes_after_a_right_head_are_a_packet_or_a_packet_error(kind, data):
    decode = DECODERS[kind - 1]
    try:
        decode(bytes([packets.VERSION, kind]) + data)
    except PacketError:
        return


@given(PLANS, st.integers(1, 40))
def test_a_cut_or_an_overlong_plan_is_refused(plan: PlanPacket, count: int):
    packet = packets.encode_plan(plan)
    for broken in (packet[:-count], packet + bytes(count)):
        with pytest.raises(PacketError):
            packets.decode_plan(broken)


@given(PLANS, st.data())
def test_a_plan_with_a_flipped_bit_is_a_plan_or_refused(plan: PlanPacket, data):
    packet = bytearray(packets.encode_plan(plan))
    packet[data.draw(st.integers(0, len(packet) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoded = packets.decode_plan(packet)
    except PacketError:
        return
    bounds = [row.max_batch_size for row in decoded.rows]
    assert bounds == sorted(set(bounds))
    assert decoded.lease_ms >= 1


def test_another_version_is_refused_by_name():
    packet = bytearray(packets.encode_plan(ONE_ROW))
    packet[0] = packets.VERSION + 1
    with pytest.raises(PacketError, match="packet version 8, this end speaks 7"):
        packets.decode_plan(packet)


def test_a_packet_of_another_kind_is_refused():
    with pytest.raises(PacketError, match="kind 3 where 2 was expected"):
        packets.decode_report(packets.encode_plan(ONE_ROW))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ()}, "0 rows leave"),
        ({"lease_ms": 0}, "a lease of 0 ms"),
        ({"rows": ONE_ROW.rows * 2}, "does not ascend"),
        ({"rows": (ONE_ROW.rows[0]._replace(asleep=True),)}, "with the drafter asleep"),
        ({"rows": (ONE_ROW.rows[0]._replace(gamma=65),)}, "gamma 65"),
        (
            {"rows": (ONE_ROW.rows[0]._replace(probe=packets.ProbeEntry(1, 0, 1, 0)),)},
            "probe 1 with gamma 1 for 0 steps",
        ),
    ],
)
def test_a_table_that_is_none_is_refused(changes, message):
    with pytest.raises(PacketError, match=message):
        packets.decode_plan(packets.encode_plan(ONE_ROW._replace(**changes)))


def test_an_introduction_too_large_for_a_packet_is_refused():
    with pytest.raises(PacketError, match="limit"):
        packets.encode_hello(bytes(packets.MAX_HELLO_BYTES + 1))


@pytest.mark.parametrize("counts", [(1, 2), (1, 2, 3, 4, 5), (-1, 0, 0, 0), (2**32, 0, 0, 0)])
def test_counts_that_do_not_fit_are_not_sent(counts):
    with pytest.raises(struct.error):
        packets.encode_report(packets.ReportPacket(1, 1, 1, 0, 3, counts, 0.1, 0, 0, 0))


def test_the_largest_plan_fits_the_stated_size():
    row = ONE_ROW.rows[0]
    rows = tuple(row._replace(max_batch_size=i + 1) for i in range(packets.MAX_ROWS))
    rules = (RULE._replace(free_expected=(1.0,) * packets.MAX_MATCH_LENGTHS),) * packets.MAX_RULES
    plan = PlanPacket(1, 1, 0, 1, 0, 0, rows, rules=rules)
    assert len(packets.encode_plan(plan)) == packets.MAX_PLAN_BYTES
    assert packets.decode_plan(packets.encode_plan(plan)) == plan


def counts_of(width: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(UINT32, min_size=width, max_size=width).map(tuple)


GROUPS = GAMMAS.flatmap(
    lambda gamma: st.builds(
        packets.GroupEntry, UINT8, st.just(gamma), counts_of(gamma + 1), st.booleans()
    )
)
PROPOSALS = GAMMAS.flatmap(
    lambda width: st.builds(
        packets.ProposalsEntry, UINT8, UINT8, counts_of(width + 1), counts_of(width)
    )
)


CLASSES = st.builds(
    packets.ClassEntry, st.text(max_size=60), counts_of(4), st.just(()) | counts_of(3)
)


@given(
    st.lists(GROUPS, max_size=4).map(tuple),
    st.lists(PROPOSALS, max_size=6).map(tuple),
    st.lists(CLASSES, max_size=4).map(tuple),
)
def test_the_parts_of_a_report_come_back_as_they_were_sent(groups, proposals, classes):
    sent = REPORT._replace(groups=groups, proposals=proposals, classes=classes)
    assert packets.decode_report(packets.encode_report(sent)) == sent


@given(st.integers(1, 30))
def test_a_report_whose_parts_are_cut_off_is_refused(count: int):
    part = packets.ProposalsEntry(1, 3, (1, 0, 2, 0), (0, 0, 1))
    packet = packets.encode_report(REPORT._replace(proposals=(part,)))
    with pytest.raises(PacketError, match="cut off"):
        packets.decode_report(packet[:-count])


def test_parts_without_end_are_refused():
    group = packets.GroupEntry(0, 0, (1,))
    packet = packets.encode_report(REPORT._replace(groups=(group,) * (packets.MAX_PARTS + 1)))
    with pytest.raises(PacketError, match="more than 144 parts"):
        packets.decode_report(packet)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 0}, "a rule of gamma 0"),
        ({"least_match": 0}, "for matches of 0 tokens"),
        ({"free_expected": ()}, "a rule for 0 match lengths"),
        ({"main_expected": math.nan}, "a rule with the numbers"),
        ({"main_expected": 65.0}, "a rule with the numbers"),
        ({"free_expected": (-1.0,)}, "a rule with the numbers"),
        ({"ratio_weight": 1.5}, "a rule with the numbers"),
    ],
)
def test_a_rule_that_is_none_is_refused(changes, message):
    with pytest.raises(PacketError, match=message):
        packets.decode_plan(
            packets.encode_plan(ONE_ROW._replace(rules=(RULE._replace(**changes),)))
        )
