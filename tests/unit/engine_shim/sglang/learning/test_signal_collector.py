"""What the engine's thread does to signal_collector, without an engine around it."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.sglang.api.settings import PluginSettings
from engine_shim.sglang.learning import signal_collector, signal_runs, verified_step
from engine_shim.sglang.learning.signal_collector import BATCH_ROUNDS, FinalStates, SignalCollector
from engine_shim.sglang.learning.signal_runs import PROMPT_POSITIONS, SignalRuns, VerifiedStepCopy
from engine_shim.sglang.learning.verified_step import PromptPass, Verification
from engine_shim.sglang.training.signals import Signal, SignalStore
from tests.support.eventually import eventually
from tests.support.peak_memory import peak_bytes

GAMMA, STEPS, ACCEPTED, TOP = 3, 12, 3, 4
WIDTH, VOCABULARY = 8, 20
# Of a canvas of one request: tokens, features and the likeliest; and what is of the request.
CANVAS_BYTES = (GAMMA + 1) * (8 + 2 * WIDTH + 8 * TOP) + 4 + 8


def verification(
    step: int,
    *,
    by_learner: bool = True,
    requests: int = 1,
    width: int = WIDTH,
    vocabulary: int = VOCABULARY,
) -> Verification:
    rows = requests * (GAMMA + 1)
    batch: Any = SimpleNamespace(
        reqs=[SimpleNamespace(rid=f"{number}") for number in range(requests)],
        seq_lens=torch.full((requests,), 100 + step * ACCEPTED),
        spec_info=SimpleNamespace(draft_token=torch.arange(rows) + step),
    )
    output = SimpleNamespace(next_token_logits=torch.randn(rows, vocabulary))
    accepted = torch.full((requests,), ACCEPTED, dtype=torch.int32)
    result: Any = SimpleNamespace(logits_output=output, accept_lens=accepted)
    return Verification(batch, result, torch.randn(rows, width), by_learner)


@pytest.fixture
def settings(tmp_path: Path) -> PluginSettings:
    return PluginSettings(signals_folder=str(tmp_path), signals_top=TOP)


@pytest.fixture
def collector(settings: PluginSettings) -> Iterator[SignalCollector]:
    new_collector = SignalCollector(settings, None)
    yield new_collector
    new_collector.close()


def kept(folder: Path) -> list[Signal]:
    return list(SignalStore(folder, 1 << 20).read())


class SlowRuns(SignalRuns):
    """Reads nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = Event()

    def read(self, canvases: Any) -> list[Signal]:
        assert self.may.wait(120)
        return super().read(canvases)


def read_slowly(settings: PluginSettings, rounds: int) -> tuple[SignalCollector, SlowRuns]:
    """`rounds` rounds, the first batch of which is being read."""
    collector = SignalCollector(settings, None)
    slow = collector._runs = SlowRuns()
    for step in range(rounds):
        collector.after_verify(verification(step), collecting=True)
        if step == BATCH_ROUNDS - 1:
            eventually(collector._queue.empty, description="the first batch is being read")
    return collector, slow


class FailingRuns(SlowRuns):
    """Out of memory at every read, once it may."""

    reads = 0

    def read(self, canvases: Any) -> list[Signal]:
        assert self.may.wait(120)
        self.reads += 1
        raise RuntimeError(f"no room for {len(canvases)} rounds")


@pytest.mark.parametrize(
    ("by_learner", "accepted", "tried"),
    [(True, STEPS * (ACCEPTED - 1), STEPS * ACCEPTED), (False, 0, 0)],
)
def test_only_the_learners_own_drafts_are_counted(
    tmp_path: Path, collector: SignalCollector, *, by_learner: bool, accepted: int, tried: int
) -> None:
    """Positions are kept whoever drafted them."""
    for step in range(STEPS):
        collector.after_verify(verification(step, by_learner=by_learner), collecting=True)
    collector.close()
    (signal,) = kept(tmp_path)
    assert (signal.start, len(signal.tokens)) == (100, STEPS * ACCEPTED)
    assert (signal.accepted, signal.tried) == (accepted, tried)


def prompt(length: int, start: int = 0) -> PromptPass:
    return PromptPass(
        ["0"], [start], [length], frozenset(), torch.arange(start, start + length),
        torch.randn(length, WIDTH),
    )  # fmt: skip


def test_the_end_of_a_prompt_comes_before_what_was_verified(
    tmp_path: Path, collector: SignalCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal_runs, "PROMPT_POSITIONS", 60)
    prompt_pass = prompt(100)
    wanted = prompt_pass.features[40:].bfloat16()
    collector.after_prefill(prompt_pass)
    prompt_pass.features.fill_(7)
    prompt_pass.tokens.fill_(7)
    for step in range(STEPS):
        collector.after_verify(verification(step), collecting=True)
    collector.close()
    (signal,) = kept(tmp_path)
    assert (signal.start, signal.context) == (40, 60)
    assert torch.equal(signal.features[:60], wanted)
    assert signal.tokens[:60].tolist() == list(range(40, 100))


def test_prompts_count_for_the_devices_budget(
    collector: SignalCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_pass = prompt(PROMPT_POSITIONS + 40)
    size = PROMPT_POSITIONS * (8 + 2 * WIDTH)
    peak = peak_bytes(lambda: collector.after_prefill(prompt_pass))
    assert collector.status()["device_bytes"] == size
    assert size <= peak < 2 * size + 4096
    monkeypatch.setattr(collector._budget, "limit_bytes", size + 10)
    assert peak_bytes(lambda: collector.after_prefill(prompt_pass)) < size / 2
    assert collector.status()["unread"] == 1


def test_what_sglang_writes_into_its_buffers_afterwards_is_not_collected(
    tmp_path: Path, collector: SignalCollector
) -> None:
    wanted, logs = [], []
    for step in range(STEPS):
        round_verification = verification(step)
        wanted.append(round_verification.features[:ACCEPTED].bfloat16())
        logs.append(round_verification.logits[:ACCEPTED].log_softmax(-1))
        collector.after_verify(round_verification, collecting=True)
        for buffer in (
            round_verification.tokens,
            round_verification.features,
            round_verification.logits,
        ):
            buffer.fill_(7)
        round_verification.batch.seq_lens.fill_(7)
        round_verification.result.accept_lens.fill_(1)
    collector.close()
    (signal,) = kept(tmp_path)
    assert torch.equal(signal.features, torch.cat(wanted))
    # What all logits would have given.
    expected = torch.cat(logs).topk(TOP)
    assert torch.equal(signal.top_tokens.long(), expected.indices)
    torch.testing.assert_close(signal.top_logs, expected.values)
    assert torch.equal(signal.tokens, torch.cat([torch.arange(3) + s for s in range(STEPS)]))


def test_the_end_of_the_regime_ends_the_runs_and_they_are_written(
    tmp_path: Path, collector: SignalCollector
) -> None:
    assert not collector.status()["open"]
    for step in range(STEPS):
        collector.after_verify(verification(step), collecting=True)
    assert collector.status()["open"]
    assert kept(tmp_path) == []
    collector.after_verify(verification(STEPS), collecting=False)
    eventually(lambda: collector.status()["signals"] == 1, description="the signal is written")
    # The reading thread reports it a moment later.
    eventually(lambda: not collector.status()["open"], description="nothing is under way")
    assert [len(signal.tokens) for signal in kept(tmp_path)] == [STEPS * ACCEPTED]


def test_rounds_that_are_large_do_not_wait_for_others(
    collector: SignalCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    runs = collector._runs

    def counting(canvases: list[VerifiedStepCopy]) -> list[Signal]:
        read.append(len(canvases))
        return SignalRuns.read(runs, canvases)

    monkeypatch.setattr(runs, "read", counting)
    monkeypatch.setattr(collector, "_batch_bytes", 5 * CANVAS_BYTES)
    for step in range(STEPS):
        collector.after_verify(verification(step), collecting=True)
        eventually(lambda: not collector._queue.unfinished_tasks, description="it has been read")
    assert read == [5, 5]


def test_rounds_that_cannot_be_read_in_time_are_dropped_and_counted(
    tmp_path: Path, settings: PluginSettings
) -> None:
    """The engine's thread never waits; what was read before and after is kept, and no gap in it."""
    # One batch being read, two waiting, and two that find no room.
    collector, slow = read_slowly(settings, 5 * BATCH_ROUNDS)
    assert collector.status()["unread"] == 2 * BATCH_ROUNDS
    slow.may.set()
    eventually(lambda: not collector._queue.unfinished_tasks, description="the queue is empty")
    for step in range(5 * BATCH_ROUNDS, 6 * BATCH_ROUNDS):
        collector.after_verify(verification(step), collecting=True)
    collector.close()
    signal_spans = [(signal.start, len(signal.tokens)) for signal in kept(tmp_path)]
    assert signal_spans == [
        (100, 3 * BATCH_ROUNDS * ACCEPTED),
        (100 + 5 * BATCH_ROUNDS * ACCEPTED, BATCH_ROUNDS * ACCEPTED),
    ]


def test_an_end_that_finds_no_room_is_said_again(tmp_path: Path, settings: PluginSettings) -> None:
    collector, slow = read_slowly(settings, 3 * BATCH_ROUNDS)
    collector.after_verify(verification(3 * BATCH_ROUNDS), collecting=False)
    assert collector._is_open
    slow.may.set()
    eventually(lambda: not collector._queue.unfinished_tasks, description="the queue is empty")
    collector.after_verify(verification(3 * BATCH_ROUNDS + 1), collecting=False)
    eventually(lambda: not collector.status()["open"], description="the runs are over")
    collector.close()
    assert [len(signal.tokens) for signal in kept(tmp_path)] == [3 * BATCH_ROUNDS * ACCEPTED]


def test_when_reading_fails_nothing_more_is_collected_and_the_state_says_why(
    settings: PluginSettings, caplog: pytest.LogCaptureFixture
) -> None:
    collector = SignalCollector(settings, None)
    runs = collector._runs = FailingRuns()
    for step in range(2 * BATCH_ROUNDS + 3):
        collector.after_verify(verification(step), collecting=True)
    runs.may.set()
    wanted = f"RuntimeError: no room for {BATCH_ROUNDS} rounds"
    eventually(lambda: collector.status()["state"] == wanted, description="it has failed")
    eventually(lambda: not collector.status()["open"], description="nothing waits")
    collector.after_verify(verification(2 * BATCH_ROUNDS + 3), collecting=True)
    assert collector._copies == []
    # What waited then is not read: who knows what a run holds by now.
    assert runs.reads == 1
    assert "training signals are no longer collected" in caplog.text
    collector.close()
    assert collector.status()["state"] == wanted


def test_after_an_error_of_the_engines_thread_what_was_read_is_written(
    tmp_path: Path, collector: SignalCollector
) -> None:
    for step in range(BATCH_ROUNDS + 3):
        collector.after_verify(verification(step), collecting=True)
    collector.stop("RuntimeError: no memory")
    eventually(lambda: collector.status()["signals"] == 1, description="the signal is written")
    collector.after_verify(verification(BATCH_ROUNDS + 3), collecting=True)
    collector.close()
    collector.close()
    assert [len(signal.tokens) for signal in kept(tmp_path)] == [BATCH_ROUNDS * ACCEPTED]
    assert collector.status()["state"] == "RuntimeError: no memory"


LARGE_BYTES = 64 * ((GAMMA + 1) * (8 + 2 * 6_000 + 8 * TOP) + 4 + 8)


def large(step: int) -> Verification:
    return verification(step, requests=64, width=6_000, vocabulary=10_000)


def test_waiting_rounds_take_no_more_of_the_device_than_they_may(
    settings: PluginSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither do their logits, which take ten megabytes each, for a moment."""
    monkeypatch.setattr(verified_step, "MAX_WORKING_BYTES", 1 << 20)
    most = 10 << 20
    settings = settings.model_copy(update={"signals_device_megabytes": most >> 20})
    collector = SignalCollector(settings, None)
    slow = collector._runs = SlowRuns()
    rounds = [large(step) for step in range(6)]

    def collect() -> None:
        for round_verification in rounds:
            collector.after_verify(round_verification, collecting=True)

    peak = peak_bytes(collect)
    assert 3 * LARGE_BYTES <= peak < most + (1 << 20)
    assert collector.status()["device_bytes"] == 3 * LARGE_BYTES
    assert collector.status()["unread"] == 3
    assert collector.status()["too_large"] == 0
    slow.may.set()
    eventually(lambda: collector.status()["device_bytes"] == 0, description="they are read")
    collector.after_verify(large(6), collecting=True)
    assert collector.status()["unread"] == 3
    collector.close()


def test_of_a_round_that_is_too_large_by_itself_nothing_is_allocated(
    tmp_path: Path, settings: PluginSettings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings.model_copy(update={"signals_device_megabytes": 2})
    collector = SignalCollector(settings, None)
    round_verification = large(0)
    assert peak_bytes(lambda: collector.after_verify(round_verification, collecting=True)) < 10_000
    collector.after_verify(round_verification, collecting=True)
    assert collector.status()["too_large"] == collector.status()["unread"] == 2
    assert not collector.status()["open"]
    (line,) = caplog.messages
    assert "a round takes 2.9 MiB" in line
    assert "SPECULATION_SIGNALS_DEVICE_MEGABYTES=2" in line
    for step in range(STEPS):
        collector.after_verify(verification(step), collecting=True)
    collector.close()
    assert [len(signal.tokens) for signal in kept(tmp_path)] == [STEPS * ACCEPTED]


def test_small_rounds_do_not_keep_out_a_large_one(settings: PluginSettings) -> None:
    settings = settings.model_copy(update={"signals_device_megabytes": 3})
    collector = SignalCollector(settings, None)
    # With these the large one has no room.
    for step in range(BATCH_ROUNDS - 1):
        collector.after_verify(verification(step, requests=10, width=100), collecting=True)
    round_verification = large(BATCH_ROUNDS - 1)
    collector.after_verify(round_verification, collecting=True)
    assert collector.status()["unread"] == 1
    eventually(lambda: collector.status()["device_bytes"] == 0, description="they are read")
    collector.after_verify(round_verification, collecting=True)
    assert collector.status()["unread"] == 1
    collector.close()


def test_what_has_been_read_is_on_the_device_no_more(
    collector: SignalCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while the thread has nothing else to read."""
    feature_references: list[weakref.ref[torch.Tensor]] = []

    def canvas_of(*arguments: Any) -> VerifiedStepCopy:
        canvas = signal_runs.copy_verified_step(*arguments)
        feature_references.append(weakref.ref(canvas.features))
        return canvas

    monkeypatch.setattr(signal_collector, "copy_verified_step", canvas_of)
    for step in range(BATCH_ROUNDS):
        collector.after_verify(verification(step), collecting=True)
    eventually(lambda: not collector._queue.unfinished_tasks, description="they are read")
    assert [reference() for reference in feature_references] == [None] * BATCH_ROUNDS
    assert collector.status()["device_bytes"] == 0


@pytest.mark.parametrize("width", [6_000, 8])
def test_rounds_that_are_dropped_give_their_room_back(settings: PluginSettings, width: int) -> None:
    collector = SignalCollector(settings, None)
    collector._runs = FailingRuns()
    collector._runs.may.set()
    for step in range(3 * BATCH_ROUNDS):
        collector.after_verify(verification(step, width=width), collecting=True)
    collector.stop("RuntimeError: no memory")
    eventually(lambda: not collector._queue.unfinished_tasks, description="the queue is empty")
    assert collector.status()["device_bytes"] == 0
    collector.close()


def test_a_second_end_finds_nothing_to_do(collector: SignalCollector) -> None:
    collector.after_verify(verification(0), collecting=True)
    collector.stop("RuntimeError: no memory")
    for _ in range(3):
        collector.close()
        # Without a reader, a full queue would be waited for.
        assert collector._queue.empty()


def test_last_hidden_states_of_another_pass_are_refused() -> None:
    """SGLang's head gets the hidden states as its second argument."""

    class Target(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits_processor = Processor()

    class Processor(torch.nn.Module):
        def forward(self, _: Any, states: torch.Tensor) -> torch.Tensor:
            return states

    target = Target()
    final = FinalStates(target)
    with pytest.raises(RuntimeError, match="not those of this round"):
        final.newest_rows(4)
    states = torch.randn(4, WIDTH)
    target.logits_processor(None, states)
    assert final.newest_rows(4) is states
    with pytest.raises(RuntimeError, match="not those of this round"):
        final.newest_rows(3)
