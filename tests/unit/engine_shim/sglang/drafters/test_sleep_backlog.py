"""The buffer of what a sleeping drafter has missed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.sglang.drafters.sleep_backlog import BacklogStep, SleepBacklog


def step(
    lengths: dict[str, int], accepted: dict[str, int] | None = None, width: int = 1
) -> BacklogStep:
    """A step over these requests at these context lengths; the token at p + 1 is 100 + p.

    accepted: how many of its rows each request keeps; None: the host does not know yet, unless the
    width is 1.
    """
    positions = torch.tensor([start + i for start in lengths.values() for i in range(width)])
    counts = None if accepted is None else [accepted[name] for name in lengths]
    return BacklogStep(
        list(lengths), positions + 100, positions[:, None].float(), [*lengths.values()],
        width=width, counts=counts,
    )  # fmt: skip


def of_batch(
    backlog: SleepBacklog, lengths: dict[str, int]
) -> tuple[dict[str, list[int]], int, int]:
    """Missed positions by request, and how many are cold and unread."""
    part = backlog.take_counted()
    positions = [token - 100 for token in part.concatenate()[0].tolist()]
    missed_rows = part.batch_rows(list(lengths), list(lengths.values()))
    names = list(lengths)
    result, offset = {}, 0
    for row, start, length in zip(
        missed_rows.rows, missed_rows.starts, missed_rows.lengths, strict=True
    ):
        result[names[row]] = [positions[i] for i in missed_rows.order[offset : offset + length]]
        assert result[names[row]] == list(range(start, start + length))
        offset += length
    assert offset == len(missed_rows.order)
    return result, missed_rows.cold, missed_rows.unread


def test_each_request_gets_its_own_positions_in_order() -> None:
    backlog = SleepBacklog(8)
    backlog.add(step({"a": 5, "b": 9}))
    backlog.add(step({"b": 10, "c": 2, "a": 6}))
    missed_positions, cold, unread = of_batch(backlog, {"a": 7, "b": 11, "c": 3})
    assert missed_positions == {"a": [5, 6], "b": [9, 10], "c": [2]}
    assert (cold, unread) == (0, 0)


def test_requests_that_missed_nothing_are_left_out() -> None:
    backlog = SleepBacklog(8)
    backlog.add(step({"a": 5}))
    assert of_batch(backlog, {"new": 40, "a": 6}) == ({"a": [5]}, 0, 0)


def test_positions_of_requests_that_left_are_counted_as_unread() -> None:
    backlog = SleepBacklog(8)
    backlog.add(step({"a": 5, "gone": 7}))
    backlog.add(step({"a": 6, "gone": 8}))
    assert of_batch(backlog, {"a": 7}) == ({"a": [5, 6]}, 0, 2)


def test_a_prefill_wipes_out_what_a_request_had_missed() -> None:
    backlog = SleepBacklog(8)
    backlog.add(step({"a": 5, "b": 9}))
    backlog.forget_requests(["a"])  # retracted, and prefilled again up to 7
    backlog.add(step({"a": 7, "b": 10}))
    assert of_batch(backlog, {"a": 8, "b": 11}) == ({"a": [7], "b": [9, 10]}, 0, 0)


def test_positions_that_do_not_lead_up_to_the_present_leave_the_request_cold() -> None:
    backlog = SleepBacklog(8)
    backlog.add(step({"a": 5, "b": 1}))
    assert of_batch(backlog, {"a": 9, "b": 2}) == ({"b": [1]}, 1, 1)


def test_it_is_full_by_steps_or_by_positions() -> None:
    by_steps = SleepBacklog(2)
    by_steps.add(step({"a": 1}))
    assert not by_steps.is_full_for(100)
    by_steps.add(step({"a": 2}))
    assert by_steps.is_full_for(1)
    # A row's hidden state is one float32.
    by_bytes = SleepBacklog(100, max_bytes=20)
    by_bytes.add(step({"a": 1, "b": 1}))
    assert by_bytes.is_full_for(4)
    assert not by_bytes.is_full_for(3)
    by_positions = SleepBacklog(100, max_positions=5)
    by_positions.add(step({"a": 1, "b": 1, "c": 1}))
    assert not by_positions.is_full_for(2)
    assert by_positions.is_full_for(3)


def test_nothing_is_left_after_clearing() -> None:
    backlog = SleepBacklog(1)
    backlog.add(step({"a": 1}))
    backlog.forget_requests(["a"])
    backlog.clear()
    assert len(backlog) == 0
    assert not backlog.is_full_for(1)
    backlog.add(step({"a": 4}))
    assert of_batch(backlog, {"a": 5}) == ({"a": [4]}, 0, 0)


@given(st.lists(st.sampled_from(["join", "leave", "retract", "step"]), max_size=60), st.data())
def test_what_is_found_is_what_was_missed(events: list[str], data: st.DataObject) -> None:
    backlog = SleepBacklog(10_000)
    lengths: dict[str, int] = {}
    expected: dict[str, list[int]] = {}
    names = (f"r{i}" for i in range(1000))
    for event in events:
        if event == "join":
            name = next(names)
            lengths[name] = data.draw(st.integers(1, 50))
            expected[name] = []
            backlog.forget_requests([name])
        elif event == "leave" and lengths:
            name = data.draw(st.sampled_from(sorted(lengths)))
            del lengths[name], expected[name]
        elif event == "retract" and lengths:
            name = data.draw(st.sampled_from(sorted(lengths)))
            lengths[name] += 1  # its last token is part of the new prefill
            expected[name] = []
            backlog.forget_requests([name])
        elif event == "step" and lengths:
            backlog.add(step(lengths))
            for name, length in lengths.items():
                expected[name].append(length)
                lengths[name] = length + 1
    if len(backlog) and lengths:
        missed_positions, cold, _ = of_batch(backlog, lengths)
        assert missed_positions == {
            name: positions for name, positions in expected.items() if positions
        }
        assert cold == 0


def test_of_a_lookup_s_step_only_what_was_accepted_is_read() -> None:
    backlog = SleepBacklog(8)
    backlog.add(step({"a": 5, "b": 9}, {"a": 3, "b": 1}, width=4))
    backlog.add(step({"a": 8, "b": 10}))
    backlog.add(step({"b": 11, "a": 9}, {"a": 1, "b": 4}, width=4))
    batch_result = of_batch(backlog, {"a": 10, "b": 15})
    assert batch_result == ({"a": [5, 6, 7, 8, 9], "b": [9, 10, 11, 12, 13, 14]}, 0, 0)


def test_a_step_that_the_host_has_not_read_back_stays() -> None:
    backlog = SleepBacklog(8)
    backlog.add(step({"a": 5}, {"a": 2}, width=3))
    newest = step({"a": 7}, width=3)
    backlog.add(newest)
    assert of_batch(backlog, {"a": 7}) == ({"a": [5, 6]}, 0, 0)
    assert backlog.newest is newest
    newest.counts = [3]
    assert of_batch(backlog, {"a": 10}) == ({"a": [7, 8, 9]}, 0, 0)
    assert len(backlog) == 0


def test_what_the_drafter_has_read_behind_missed_steps_is_forgotten_with_them() -> None:
    backlog = SleepBacklog(8)
    backlog.add(step({"a": 5}, {"a": 2}, width=3))
    read = step({"a": 7}, width=3)
    read.is_read = True
    backlog.add(read)
    part = backlog.take_counted()
    assert not part.is_latest
    assert part.batch_rows(["a"], [7]).lengths == [2]
    assert len(backlog) == 0


def test_a_read_step_is_read_again_if_the_drafter_goes_on_sleeping() -> None:
    backlog = SleepBacklog(8)
    backlog.add(step({"a": 5}, {"a": 2}, width=3))
    read = step({"a": 7}, {"a": 1}, width=3)
    read.is_read = True
    backlog.add(read)
    backlog.add(step({"a": 8}, {"a": 2}, width=3))
    assert of_batch(backlog, {"a": 10}) == ({"a": [5, 6, 7, 8, 9]}, 0, 0)


def test_a_prefill_counts_also_for_what_is_taken_out_later() -> None:
    backlog = SleepBacklog(8)
    backlog.add(step({"a": 5}, {"a": 2}, width=3))
    newest = step({"a": 7, "b": 4}, width=3)
    backlog.add(newest)
    backlog.forget_requests(["b"])
    of_batch(backlog, {"a": 7})
    newest.counts = [1, 1]
    backlog.add(step({"a": 8, "b": 30}))
    assert of_batch(backlog, {"a": 9, "b": 31}) == ({"a": [7, 8], "b": [30]}, 0, 0)


def test_rows_that_were_not_accepted_take_room_until_they_are_taken_out() -> None:
    backlog = SleepBacklog(100, max_positions=8)
    backlog.add(step({"a": 1}, {"a": 1}, width=5))
    assert backlog.is_full_for(5)
    assert not backlog.is_full_for(3)
    backlog.add(step({"a": 2}, width=3))
    backlog.take_counted()
    assert not backlog.is_full_for(5)
    assert backlog.is_full_for(6)
