"""A sleeping step hands over no event: docs/architecture.md says why, and what that rests on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.sglang.api.versions import TESTED
from engine_shim.sglang.drafters.sleeping_drafter import SleepingDrafter
from tests.support.installed_wheel import unpack_sglang


def test_the_verification_s_event_stays_with_the_target() -> None:
    verified = object()
    target = SimpleNamespace(shared_read_done_event=verified)
    drafter = SimpleNamespace(shared_read_done_event=None)
    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=target),
        draft_worker=SimpleNamespace(draft_runner=drafter),
        last_shared_read_runner=drafter,
        _stub_skipped_draft_extend=lambda *_: None,
    )
    lengths = torch.tensor([7])
    batch: Any = SimpleNamespace(
        reqs=[SimpleNamespace(rid="one")], seq_lens=lengths, seq_lens_cpu=lengths
    )
    output = SimpleNamespace(hidden_states=torch.zeros(1, 4))
    result = SimpleNamespace(next_token_ids=torch.tensor([3]), logits_output=output)
    sleeper = SleepingDrafter(worker, 8)
    sleeper.before_step(batch, asleep=True)
    sleeper.sleep_through(batch, result)
    assert sleeper.counters.slept == 1
    assert drafter.shared_read_done_event is None
    assert target.shared_read_done_event is verified


@pytest.mark.parametrize("version", TESTED)
@pytest.mark.parametrize(
    ("path", "says"),
    [
        # Without an event the schedule stream waits for the whole step.
        ("managers/scheduler.py", "self.schedule_stream.wait_stream(self.forward_stream)"),
        ("managers/scheduler.py", "runner.shared_read_done_event = None"),
        # It waits for the end of the verification with any barrier.
        ("managers/overlap_utils.py", "self.publish_ready.wait()"),
        ("managers/overlap_utils.py", "batch.seq_lens = self.new_seq_lens_buf[fi]"),
        ("speculative/eagle_worker_v2.py", "on_publish(batch_output.new_seq_lens)"),
        ("speculative/eagle_worker_v2.py", "return self._draft_worker.draft_runner"),
    ],
)
def test_sglang_orders_its_streams_as_described(version: str, path: str, says: str) -> None:
    assert says in (unpack_sglang(version) / "sglang" / "srt" / path).read_text()
