"""Each step's report is about the choice that its drafts were made under, one step before."""

from types import SimpleNamespace
from typing import Any

import pytest

from controller.wire.reports import report_from_proto
from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.vllm import steered_scheduler, step_reports, vllm_api
from engine_shim.vllm.settings import VllmSettings
from engine_shim.vllm.steered_scheduler import SchedulerHooks, is_speculation_disabled
from engine_shim.vllm.step_reports import StepReporter
from tests.support.step_reports import flags_of, group, proposals
from tests.unit.engine_shim.vllm.fakes import CACHES, Link, choice, output, request, result

GAMMAS = (0, 1, 3, 5)
TICK_SECONDS = 0.01


class Clock:
    """Goes on by a tick each time it is read."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += TICK_SECONDS
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    fake_clock = Clock()
    monkeypatch.setattr(steered_scheduler, "perf_counter", fake_clock)
    monkeypatch.setattr(step_reports, "perf_counter", fake_clock)
    return fake_clock


class HandScheduler:
    """Steps of a scheduler, by hand: every request is decoding unless it has no output."""

    def __init__(self, *choices: StepChoice, gammas: Any = GAMMAS, **tap: Any) -> None:
        self.link = Link(*choices)
        link: Any = self.link
        options = {"may_draft_less": False, "is_async": False} | tap
        step_reporter = StepReporter(link, gammas, **options)
        self.steering = SchedulerHooks(link, step_reporter, gammas)
        self.requests: dict[str, Any] = {}

    def add(self, *requests: Any) -> None:
        for one in requests:
            self.requests[one.request_id] = one
            self.steering.after_add_request(one, self.requests)

    def schedule(
        self, scheduled: Any, drafts: Any = None, finished: Any = (), preempted: Any = ()
    ) -> Any:
        schedule_output = output(scheduled, drafts, finished, preempted)
        self.steering.after_schedule(schedule_output, self.requests)
        for name, tokens in scheduled.items():
            self.requests[name].num_computed_tokens += tokens
        return schedule_output

    def finish(self, schedule_output: Any, sampled: Any, taken: Any = None) -> None:
        """Works a result in.  taken: tokens of answers that end, of fewer than they got."""
        got = result(sampled)
        step_results = self.steering.count_rows(schedule_output, got, self.requests)
        for name, tokens in (taken or {}).items():
            del got.sampled_token_ids[got.req_id_to_index[name]][tokens:]
        for name, tokens in sampled.items():
            if name not in self.requests:
                continue
            mine = self.requests[name]
            mine.num_tokens += tokens
            mine.num_output_tokens += tokens
            mine.num_computed_tokens = mine.num_tokens - 1
        self.steering.after_process_result(step_results)

    def step(self, scheduled: Any, drafts: Any, sampled: Any) -> Any:
        schedule_output = self.schedule(scheduled, drafts)
        self.finish(schedule_output, sampled)
        return schedule_output


def flags(report: Any) -> set[str]:
    return flags_of(report) - {"first_use"}


def test_what_a_step_verifies_was_drafted_under_the_choice_before():
    engine = HandScheduler(choice(3, epoch=1), choice(5, epoch=2, probe=8), choice(1, epoch=3))
    engine.add(request("a", output=0))
    schedule = engine.step({"a": 10}, {}, {"a": 1})
    assert schedule.num_spec_tokens_to_schedule == 3
    assert engine.link.reports == []  # it read a prompt
    engine.step({"a": 4}, {"a": 3}, {"a": 3})
    engine.step({"a": 6}, {"a": 5}, {"a": 1})
    engine.step({"a": 2}, {"a": 1}, {"a": 2})
    report_rows = [
        (r.step, r.gamma, r.plan_epoch, r.probe_id, list(r.accepted_counts))
        for r in engine.link.reports
    ]
    assert report_rows == [
        (1, 3, 1, 0, [0, 0, 1, 0]),
        (2, 5, 2, 8, [1, 0, 0, 0, 0, 0]),
        (3, 1, 3, 0, [0, 1]),
    ]
    # The first two verified one length and drafted another.
    assert [flags(r) for r in engine.link.reports] == [
        {"mixed_choice"}, {"mixed_choice", "switched"}, {"switched"},
    ]  # fmt: skip


def test_with_async_scheduling_the_result_comes_after_the_next_schedule():
    engine = HandScheduler(choice(3, 1), choice(1, 2), choice(0, 3), is_async=True)
    engine.add(request("a", output=0))
    prompt = engine.schedule({"a": 10})
    first = engine.schedule({"a": 4}, {"a": 3})
    engine.finish(prompt, {"a": 1})
    second = engine.schedule({"a": 2}, {"a": 1})
    engine.finish(first, {"a": 4})
    engine.finish(second, {"a": 1})
    assert [(r.gamma, r.plan_epoch) for r in engine.link.reports] == [(3, 1), (1, 2)]
    # Drafting after the prompt fell into the first step.
    assert flags(engine.link.reports[0]) == {"mixed_choice", "after_gap"}


def test_the_plan_is_asked_for_the_rows_that_will_decode_next():
    engine = HandScheduler(choice(3))
    engine.add(request("a"), request("b", prompt=30, output=0), request("c", prompt=5, output=0))
    schedule = engine.schedule({"a": 1, "b": 16, "c": 5})
    assert engine.link.asked == [2]
    assert schedule.num_spec_tokens_to_schedule == 3


@pytest.mark.parametrize(("gammas", "drafts"), [(GAMMAS, 0), ((1, 3), 7)])
def test_a_step_after_which_nothing_decodes_asks_for_nothing(gammas, drafts):
    engine = HandScheduler(choice(3, probe=4), gammas=gammas)
    engine.add(request("a", prompt=30, output=0))
    schedule = engine.schedule({"a": 16})
    assert engine.link.asked == []
    assert engine.link.polls == 1
    assert schedule.num_spec_tokens_to_schedule == drafts


def test_an_empty_schedule_is_left_alone_and_is_a_pause():
    engine = HandScheduler(choice(3))
    engine.add(request("a"))
    engine.step({"a": 1}, {}, {"a": 1})
    engine.step({"a": 4}, {"a": 3}, {"a": 2})
    schedule = engine.schedule({})
    assert schedule.num_spec_tokens_to_schedule == 7
    engine.finish(schedule, {})
    engine.step({"a": 4}, {"a": 3}, {"a": 2})
    assert [flags(r) for r in engine.link.reports] == [set(), {"after_gap"}]


def test_prompt_tokens_beside_decoding_are_counted_and_no_rows_of_it():
    engine = HandScheduler(choice(3))
    engine.add(request("a"), request("b", output=0))
    engine.step({"a": 1}, {}, {"a": 1})
    engine.step({"a": 4, "b": 10}, {"a": 3}, {"a": 1, "b": 1})
    (report,) = engine.link.reports
    assert (report.batch_size, report.prefill_tokens, report.kv_tokens) == (1, 10, 11)
    assert list(report.accepted_counts) == [1, 0, 0, 0]


def test_rows_of_other_widths_are_groups():
    engine = HandScheduler(choice(3))
    engine.add(request("a"), request("b"))
    engine.step({"a": 1, "b": 1}, {}, {"a": 1, "b": 1})
    # b is near the longest sequence that the model takes.
    engine.step({"a": 4, "b": 2}, {"a": 3, "b": 1}, {"a": 4, "b": 2})
    (report,) = engine.link.reports
    assert report.gamma == 3
    assert list(report.accepted_counts) == [0, 1, 0, 1]
    assert list(report.groups) == [group("eagle3", [0, 1]), group("eagle3", [0, 0, 0, 1])]


def test_what_a_lookup_did_not_find_was_not_verified_and_counts_as_refused():
    engine = HandScheduler(choice(3), may_draft_less=True)
    engine.add(request("a"), request("b"), request("c"))
    engine.step(dict.fromkeys("abc", 1), {}, dict.fromkeys("abc", 1))
    engine.step({"a": 1, "b": 4, "c": 3}, {"b": 3, "c": 2}, {"a": 1, "b": 3, "c": 3})
    (report,) = engine.link.reports
    assert (report.gamma, list(report.accepted_counts)) == (3, [1, 0, 2, 0])
    assert list(report.groups) == [
        group("eagle3", [1]), group("eagle3", [0, 0, 1]), group("eagle3", [0, 0, 1, 0]),
    ]  # fmt: skip
    assert list(report.proposals) == [proposals("eagle3", [1, 0, 2, 0])]
    assert not report.flags.mixed_choice


def test_what_a_grammar_took_away_was_not_verified_and_shows_nothing():
    engine = HandScheduler(choice(3))
    engine.add(request("a", use_structured_output=True), request("b", use_structured_output=True))
    engine.step({"a": 1, "b": 1}, {}, {"a": 1, "b": 1})
    engine.step({"a": 1, "b": 3}, {"b": 2}, {"a": 1, "b": 3})
    (report,) = engine.link.reports
    # The arm is that of the plan, though no row was as wide.
    assert (report.gamma, list(report.accepted_counts)) == (3, [1, 0, 1, 0])
    assert list(report.groups) == [group("eagle3", [1]), group("eagle3", [0, 0, 1])]
    assert not report.proposals
    assert report_from_proto(report).drafted_counts == ([0, 0, 0, 0], [0, 0, 1])


def test_padding_in_place_of_drafts_that_a_grammar_forbade_is_no_draft():
    """As async scheduling leaves it."""
    engine = HandScheduler(choice(3), is_async=True)
    engine.add(request("a", use_structured_output=True))
    engine.step({"a": 1}, {}, {"a": 1})
    schedule = engine.schedule({"a": 4}, {"a": 3})
    schedule.num_invalid_spec_tokens = {"a": 2}
    engine.finish(schedule, {"a": 1})
    (report,) = engine.link.reports
    assert (report.gamma, list(report.groups)) == (3, [group("eagle3", [1, 0])])


def test_a_row_that_was_cut_at_its_end_shows_what_the_answer_took():
    engine = HandScheduler(choice(3))
    engine.add(*(request(name) for name in "abc"))
    engine.step(dict.fromkeys("abc", 1), {}, dict.fromkeys("abc", 1))
    schedule = engine.schedule(dict.fromkeys("abc", 4), dict.fromkeys("abc", 3))
    # Of 4, 3 and 3 tokens; vLLM takes one of the first, one of the second, and all of the last.
    engine.finish(schedule, {"a": 4, "b": 3, "c": 3}, {"a": 1, "b": 1})
    (report,) = engine.link.reports
    assert (list(report.accepted_counts), list(report.groups)) == ([0, 0, 2, 1], [])
    assert list(report.proposals) == [proposals("eagle3", [0, 0, 1, 0], [0, 2, 0])]
    assert report.delivered_tokens == 5


def test_rows_drafted_under_another_choice_are_reported_as_mixed():
    engine = HandScheduler(choice(3, 1), choice(5, 2))
    engine.add(*(request(name) for name in "abc"))
    engine.step(dict.fromkeys("abc", 1), {}, dict.fromkeys("abc", 1))
    engine.step({"a": 4, "b": 4}, {"a": 3, "b": 3}, {"a": 1, "b": 1})
    # c was left out of the step before.
    engine.step({"a": 6, "b": 6, "c": 4}, {"a": 5, "b": 5, "c": 3}, dict.fromkeys("abc", 1))
    report = engine.link.reports[-1]
    assert (report.plan_epoch, report.gamma, report.batch_size) == (2, 5, 3)
    assert report.flags.mixed_choice
    assert list(report.groups) == [
        group("eagle3", [1, 0, 0, 0]),
        group("eagle3", [2, 0, 0, 0, 0, 0]),
    ]


def test_requests_that_must_not_be_drafted_for_are_a_group_of_their_own():
    engine = HandScheduler(choice(3))
    engine.add(request("a"), request("b", extra={"speculation": False}))
    engine.step({"a": 1, "b": 1}, {}, {"a": 1, "b": 1})
    engine.requests["a"].spec_token_ids = engine.requests["b"].spec_token_ids = [1, 2, 3]
    engine.steering.withhold_drafts(["a", "b", "gone"], engine.requests)
    assert engine.requests["a"].spec_token_ids == [1, 2, 3]
    assert engine.requests["b"].spec_token_ids == []
    engine.step({"a": 4, "b": 1}, {"a": 3}, {"a": 2, "b": 1})
    (report,) = engine.link.reports
    assert list(report.accepted_counts) == [1, 1, 0, 0]
    assert list(report.groups) == [group("eagle3", [0, 1, 0, 0]), group("", [1])]
    assert not report.flags.mixed_choice


def test_nothing_is_drafted_where_nobody_may_be_drafted_for():
    engine = HandScheduler(choice(3))
    engine.add(request("b", extra={"speculation": 0}))
    for _ in range(2):
        schedule = engine.step({"b": 1}, {}, {"b": 1})
        assert schedule.num_spec_tokens_to_schedule == 0
    (report,) = engine.link.reports
    assert (report.gamma, list(report.accepted_counts)) == (0, [1])
    assert list(report.groups) == [group("", [1])]
    assert report.flags.mixed_choice  # the plan asked for 3


def test_a_row_without_drafts_verified_less_than_its_choice_whatever_comes_next():
    engine = HandScheduler(choice(3), choice(0))
    engine.add(request("b", extra={"speculation": False}))
    engine.step({"b": 1}, {}, {"b": 1})
    engine.step({"b": 1}, {}, {"b": 1})
    assert engine.link.reports[0].flags.mixed_choice


def test_drafts_that_were_cut_at_the_longest_sequence_are_no_arm_of_their_own():
    engine = HandScheduler(choice(3))
    engine.add(request("a"))
    engine.step({"a": 1}, {}, {"a": 1})
    engine.step({"a": 2}, {"a": 1}, {"a": 2})
    (report,) = engine.link.reports
    assert (report.gamma, list(report.accepted_counts), list(report.groups)) == (1, [0, 1], [])
    assert report.flags.mixed_choice


@pytest.mark.parametrize(
    ("extra", "wish"),
    [
        ({"speculation": False}, True),
        ({"speculation": 0}, True),
        ({"speculation": 0.0}, True),
        ({"speculation": True}, False),
        ({"speculation": 1}, False),
        ({"speculation": "false"}, False),
        ({"speculation": None}, False),
        ({"speculation": []}, False),
        ({}, False),
        (None, False),
        ("speculation", False),
    ],
)
def test_only_false_keeps_a_request_from_being_drafted_for(extra, wish):
    assert is_speculation_disabled(request("a", extra=extra)) is wish
    assert not is_speculation_disabled(request("a", sampling_params=None))


def test_requests_that_have_ended_are_forgotten_and_their_rows_are_a_group_of_their_own():
    engine = HandScheduler(choice(3))
    engine.add(request("a"), request("b", extra={"speculation": False}), request("c"))
    engine.step(dict.fromkeys("abc", 1), {}, dict.fromkeys("abc", 1))
    schedule = engine.schedule({"a": 4, "b": 1, "c": 4}, {"a": 3, "c": 3})
    engine.requests["a"].is_finished = lambda: True
    del engine.requests["c"]
    engine.finish(schedule, {"a": 4, "b": 1, "c": 4})
    (report,) = engine.link.reports
    assert (report.batch_size, report.gamma, report.kv_tokens) == (3, 0, 33)
    assert list(report.groups) == [group("", [1]), group("eagle3", [2], ended=True)]
    # The step was as wide as the rows that had ended.
    assert report.flags.mixed_choice
    assert report.delivered_tokens == 1
    del engine.requests["a"], engine.requests["b"]
    engine.schedule({}, {}, finished=["a", "b", "c"])
    assert engine.steering.undrafted == set()
    assert engine.steering._choice_by_request == {}


def test_a_preempted_request_reads_its_tokens_again_as_a_prompt():
    engine = HandScheduler(choice(3))
    engine.add(request("a"), request("b"))
    engine.step({"a": 1, "b": 1}, {}, {"a": 1, "b": 1})
    engine.requests["b"].num_computed_tokens = 0
    engine.step({"a": 4, "b": 12}, {"a": 3}, {"a": 1, "b": 1})
    report = engine.link.reports[-1]
    assert (report.batch_size, report.prefill_tokens) == (1, 12)


def test_a_step_without_a_lease_says_so():
    engine = HandScheduler(choice(3, 0, source=Source.GRACE))
    engine.add(request("a"))
    engine.step({"a": 1}, {}, {"a": 1})
    engine.step({"a": 4}, {"a": 3}, {"a": 1})
    assert flags(engine.link.reports[0]) == {"unsteered"}


def test_a_batch_beyond_the_graphs_is_a_plain_step_since_it_never_has_one(monkeypatch):
    """Else its cost would never be learnt: vLLM's graphs end at 512 tokens by default."""
    link = Link(choice(3))
    monkeypatch.setattr(EngineLink, "start", lambda *_: link)
    monkeypatch.setattr(
        steered_scheduler, "describe_engine", lambda *_: SimpleNamespace(engine_id="x")
    )
    compilation = SimpleNamespace(
        cudagraph_mode=SimpleNamespace(name="PIECEWISE"), cudagraph_capture_sizes=[1, 2]
    )
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method="eagle3", num_speculative_tokens=3),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        compilation_config=compilation,
        use_v2_model_runner=False,
    )
    scheduler = SimpleNamespace(
        vllm_config=config, dynamic_sd_lookup=[0, 3, 2, 1, 0], kv_cache_config=CACHES, waiting=[]
    )
    engine = HandScheduler(choice(3))
    engine.steering = steered_scheduler.start_hooks(scheduler, VllmSettings.load())
    engine.add(request("a"))
    engine.step({"a": 1}, {}, {"a": 1})
    engine.step({"a": 4}, {"a": 3}, {"a": 1})
    engine.step({"a": 4}, {"a": 3}, {"a": 1})
    assert [flags_of(report) for report in link.reports] == [{"first_use"}, set()]


def test_a_step_after_a_pause_of_the_engine_says_so(clock):
    """vLLM can be told to pause and to keep its requests: it then schedules nothing at all."""
    engine = HandScheduler(choice(3))
    engine.add(request("a"))
    engine.step({"a": 1}, {}, {"a": 1})
    engine.step({"a": 4}, {"a": 3}, {"a": 1})
    clock.now += 60
    engine.step({"a": 4}, {"a": 3}, {"a": 1})
    engine.step({"a": 4}, {"a": 3}, {"a": 1})
    assert [r.flags.after_gap for r in engine.link.reports] == [False, True, False]
    seconds = [round(r.step_seconds / TICK_SECONDS) for r in engine.link.reports]
    assert seconds == [2, 1, 2]


def test_a_step_of_a_length_that_is_no_arm_is_not_reported():
    engine = HandScheduler(choice(3))
    engine.add(request("a"), request("b"))
    engine.step({"a": 1, "b": 1}, {}, {"a": 1, "b": 1})
    # Both are near the longest sequence that the model takes.
    engine.step({"a": 3, "b": 2}, {"a": 2, "b": 1}, {"a": 3, "b": 1})
    assert engine.link.reports == []
    assert engine.steering._reporter is not None
    assert engine.steering._reporter.skipped_steps == 1


def test_more_drafts_than_were_chosen_are_cut():
    """vLLM's first model runner hands on zeros where a sequence is too long for the drafter."""
    engine = HandScheduler(choice(1), choice(0))
    engine.add(request("a"), request("b"))
    engine.step({"a": 1, "b": 1}, {}, {"a": 1, "b": 1})
    drafts = [[0] * 7, [4], []]
    engine.steering.truncate_drafts(drafts)
    assert drafts == [[0], [4], []]
    engine.step({"a": 2, "b": 2}, {"a": 1, "b": 1}, {"a": 1, "b": 1})
    engine.steering.truncate_drafts(drafts)
    assert drafts == [[], [], []]


def test_a_name_that_is_used_again_at_once_keeps_the_new_requests_wish():
    engine = HandScheduler(choice(3))
    engine.add(request("a", extra={"speculation": False}))
    engine.step({"a": 1}, {}, {"a": 1})
    engine.add(request("a", output=0, extra={"speculation": False}), request("b", output=0))
    engine.schedule({"a": 10, "b": 10}, {}, finished=["a"])
    assert engine.steering.undrafted == {"a"}
    engine.add(request("a", output=0))
    assert engine.steering.undrafted == set()


def test_the_end_of_a_request_in_parts_does_not_take_back_its_wish():
    """vLLM announces the end with a part of its own, which has the wishes of the first one."""
    engine = HandScheduler(choice(3))
    engine.add(request("a"))
    engine.steering.after_add_request(request("a", extra={"speculation": False}), engine.requests)
    assert engine.steering.undrafted == {"a"}
    engine.steering.after_add_request(request("a"), engine.requests)
    assert engine.steering.undrafted == {"a"}


def test_an_ended_request_whose_cache_is_still_needed_is_forgotten():
    engine = HandScheduler(choice(3))
    engine.add(request("a", extra={"speculation": False}), request("b"))
    engine.step({"a": 1, "b": 1}, {}, {"a": 1, "b": 1})
    engine.requests["a"].is_finished = lambda: True
    engine.schedule({"b": 4}, {"b": 3}, finished=["a"])
    assert engine.steering.undrafted == set()


@pytest.mark.parametrize(("dropped", "rows"), [(True, 1), (False, 2)])
def test_what_vllm_drops_after_a_preemption_of_all_has_no_drafts(dropped, rows):
    engine = HandScheduler(choice(3))
    engine.add(request("a"), request("b"))
    engine.step({"a": 1, "b": 1}, {}, {"a": 1, "b": 1})
    schedule = engine.schedule({"a": 4, "b": 4}, {"a": 3, "b": 3})
    engine.requests["b"].num_stale_output_tokens = 4
    engine.requests["b"].drop_stale_output = dropped
    engine.finish(schedule, {"a": 2, "b": 4})
    (report,) = engine.link.reports
    assert report.batch_size == 2
    drafted = report.groups[0] if report.groups else group("eagle3", report.accepted_counts)
    assert sum(drafted.accepted_counts) == rows


def test_a_preempted_request_has_lost_its_drafts_and_refused_none():
    """All but its newest token may be in the prefix cache when it is taken up again."""
    engine = HandScheduler(choice(3), may_draft_less=True)
    engine.add(request("a"), request("b"))
    engine.step({"a": 1, "b": 1}, {}, {"a": 1, "b": 1})
    schedule = engine.schedule({"a": 4}, {"a": 3}, preempted=["b"])
    engine.finish(schedule, {"a": 1})
    engine.step({"a": 4, "b": 1}, {"a": 3}, {"a": 1, "b": 1})
    report = engine.link.reports[-1]
    assert (report.batch_size, report.prefill_tokens) == (1, 1)


def test_steps_of_more_different_rows_than_the_contract_has_groups_are_not_reported():
    engine = HandScheduler(choice(17), gammas=range(18))
    names = [f"r{n}" for n in range(17)]
    engine.add(*map(request, names))
    engine.step(dict.fromkeys(names, 1), {}, dict.fromkeys(names, 1))
    widths = {name: place + 1 for place, name in enumerate(names)}
    engine.step({n: w + 1 for n, w in widths.items()}, widths, dict.fromkeys(names, 1))
    assert engine.link.reports == []
    assert engine.steering._reporter is not None
    assert engine.steering._reporter.skipped_steps == 1


def test_an_error_ends_the_reports_and_not_the_engine(caplog):
    engine = HandScheduler(choice(3))
    engine.add(request("a"))
    engine.step({"a": 1}, {}, {"a": 1})
    schedule = engine.schedule({"a": 4}, {"a": 3})
    schedule.scheduled_spec_decode_tokens = None
    engine.finish(schedule, {"a": 1})
    assert "no longer reported" in caplog.text
    schedule = engine.step({"a": 4}, {"a": 3}, {"a": 1})
    assert schedule.num_spec_tokens_to_schedule == 3
    assert engine.link.reports == []


def test_a_result_of_an_unknown_step_is_not_reported():
    engine = HandScheduler(choice(3))
    engine.add(request("a"))
    engine.step({"a": 1}, {}, {"a": 1})
    engine.finish(output({"a": 4}, {"a": 3}), {"a": 1})
    assert engine.link.reports == []


def test_the_last_token_of_a_prompt_is_no_decoding_row():
    engine = HandScheduler(choice(0))
    engine.add(request("a", output=0), request("b"))
    engine.step({"a": 9, "b": 1}, {}, {"a": 0, "b": 1})
    engine.requests["a"].num_computed_tokens = 9
    engine.step({"a": 1, "b": 1}, {}, {"a": 1, "b": 1})
    (report,) = engine.link.reports
    assert (report.batch_size, report.prefill_tokens) == (1, 1)


def test_a_result_of_another_step_is_not_taken_for_the_one_that_waits():
    engine = HandScheduler(choice(3))
    engine.add(request("a"))
    engine.step({"a": 1}, {}, {"a": 1})
    waiting = engine.schedule({"a": 4}, {"a": 3})
    engine.finish(output({"a": 4}, {"a": 3}), {"a": 1})
    engine.finish(waiting, {"a": 1})
    assert engine.link.reports == []


def test_with_async_scheduling_prompts_in_every_step_are_no_gap():
    engine = HandScheduler(choice(3), is_async=True)
    engine.add(request("a"), request("b", prompt=100, output=0))
    engine.step({"a": 1}, {}, {"a": 1})
    for _ in range(2):
        engine.step({"a": 4, "b": 16}, {"a": 3}, {"a": 1, "b": 0})
        engine.requests["b"].num_computed_tokens = 16
    engine.step({"a": 4}, {"a": 3}, {"a": 1})
    gap_flags = [report.flags.after_gap for report in engine.link.reports]
    assert gap_flags == [False, False, True]


@pytest.mark.parametrize(
    ("method", "is_async", "may_draft_less"),
    [("ngram", False, True), ("eagle3", True, False)],
)
def test_an_engine_is_reported_as_it_is_configured(monkeypatch, method, is_async, may_draft_less):
    started: list[Any] = []

    def start_link(spec: Any, settings: Any, gamma: int) -> Link:
        started.append((spec, gamma))
        return Link(choice(3))

    monkeypatch.setattr("engine_shim.vllm.steered_scheduler.EngineLink.start", start_link)
    monkeypatch.setattr(
        steered_scheduler, "describe_engine", lambda *_: SimpleNamespace(engine_id="named")
    )
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, num_speculative_tokens=5),
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        compilation_config=SimpleNamespace(cudagraph_mode=None, cudagraph_capture_sizes=None),
        use_v2_model_runner=False,
    )
    scheduler = SimpleNamespace(
        vllm_config=config, dynamic_sd_lookup=[0, 5, 5, 3, 2, 1, 0], kv_cache_config=CACHES
    )
    steering = steered_scheduler.start_hooks(scheduler, VllmSettings.load())
    tap = steering._reporter
    assert tap is not None
    assert (tap._may_draft_less, tap._is_async) == (may_draft_less, is_async)
    assert [gamma for _, gamma in started] == [5]


@pytest.mark.parametrize(
    ("version", "is_second", "says"),
    [
        ("0.31.0", True, "the second model runner of vLLM 0.31.0 drafts num_speculative_tokens"),
        ("0.31.0", False, ""),
        ("0.32.0", True, ""),
    ],
)
def test_an_engine_whose_drafting_does_not_follow_starts_with_a_warning(
    monkeypatch, caplog, version, is_second, says
):
    monkeypatch.setattr(EngineLink, "start", lambda *_: Link(choice(3)))
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: version)
    monkeypatch.setattr(
        steered_scheduler, "describe_engine", lambda *_: SimpleNamespace(engine_id="named")
    )
    drafter = SimpleNamespace(hf_config=SimpleNamespace())
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="eagle3", num_speculative_tokens=3, draft_model_config=drafter
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        use_v2_model_runner=is_second,
    )
    scheduler = SimpleNamespace(
        vllm_config=config, dynamic_sd_lookup=[0, 3, 2, 1, 0], kv_cache_config=CACHES
    )
    steered_scheduler.start_hooks(scheduler, VllmSettings.load())
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [message.startswith(says) for message in warned] == ([True] if says else [])


def test_an_engine_whose_caches_hold_a_state_that_vllm_loses_does_not_start(monkeypatch):
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: "0.31.0")
    started: list[Any] = []
    monkeypatch.setattr(EngineLink, "start", lambda *a: started.append(a))

    class MambaSpec: ...

    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=MambaSpec())])
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method="mtp", num_speculative_tokens=3),
    )
    scheduler = SimpleNamespace(
        vllm_config=config, dynamic_sd_lookup=[0, 3, 2, 1, 0], kv_cache_config=caches
    )
    with pytest.raises(UnsupportedEngineError, match="silently wrong"):
        steered_scheduler.start_hooks(scheduler, VllmSettings.load())
    assert started == []


@pytest.mark.parametrize("tokens", [None, 0, 700])
def test_prompts_that_wait_are_reported_where_they_are_counted(tokens: int | None):
    engine = HandScheduler(
        choice(3), waiting_prompts=None if tokens is None else SimpleNamespace(count=lambda: tokens)
    )
    engine.add(request("a"))
    engine.step({"a": 1}, {}, {"a": 1})
    engine.step({"a": 4}, {"a": 3}, {"a": 2})
    (report,) = engine.link.reports
    assert report.waiting_prompt_tokens == (tokens or 0)
