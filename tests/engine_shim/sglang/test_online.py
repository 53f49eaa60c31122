"""Which drafters can learn, and when their weights count as worse."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.sglang.online import Acceptance, cannot_update_reason


def worker(name: str = "LlamaForCausalLMEagle3", **changes: Any) -> Any:
    config = {"num_hidden_layers": 1, "rope_scaling": None} | changes
    hot = config.pop("hot_token_id", torch.arange(40))
    model = type(name, (), {})()
    model.config, model.hot_token_id = SimpleNamespace(**config), hot
    runner = SimpleNamespace(model=model)
    return SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=runner))


@pytest.mark.parametrize("hot", [None, torch.arange(40)])
def test_an_eagle3_drafter_of_the_whole_vocabulary_can_learn_on_a_cpu(hot: Any) -> None:
    assert cannot_update_reason(worker(hot_token_id=hot), "cpu", 1) is None
    default = {"rope_type": "default", "rope_theta": 1e4}
    assert cannot_update_reason(worker(rope_scaling=default), "cpu", 1) is None


@pytest.mark.parametrize(
    ("asked", "device", "ranks", "reason"),
    [
        (worker("DFlashDraftModel"), "cpu", 1, "DFlashDraftModel has no student"),
        (worker(), "cuda", 1, "on cuda it is untested"),
        (worker(), "cpu", 2, "2 ranks share the drafter's weights"),
        (worker(hot_token_id=torch.arange(40) * 2), "cpu", 1, "vocabulary is smaller"),
        (worker(rope_scaling={"factor": 8.0}), "cpu", 1, "rotary positions are scaled"),
        (worker(num_hidden_layers=2), "cpu", 1, "it has 2 layers"),
    ],
)
def test_others_are_named(asked: Any, device: str, ranks: int, reason: str) -> None:
    assert reason in str(cannot_update_reason(asked, device, ranks))


def acceptance(successes: int, trials: int) -> Acceptance:
    found = Acceptance()
    found.add(successes, trials)
    return found


def test_a_fall_is_measured_in_standard_errors() -> None:
    good = acceptance(280, 400)
    assert acceptance(280, 400).fell_from(good) == 0
    assert acceptance(300, 400).fell_from(good) < 0
    # 0.70 to 0.60: about 0.1 / sqrt(2 * 0.65 * 0.35 / 400).
    assert acceptance(240, 400).fell_from(good) == pytest.approx(2.97, abs=0.02)
    assert acceptance(100, 400).fell_from(good) > 10


def test_without_trials_nothing_has_fallen() -> None:
    assert Acceptance().fell_from(acceptance(5, 10)) == 0
    assert acceptance(5, 10).fell_from(Acceptance()) == 0


def test_certainty_on_both_sides_is_no_fall() -> None:
    assert acceptance(0, 50).fell_from(acceptance(0, 400)) == 0
    assert acceptance(50, 50).fell_from(acceptance(400, 400)) == 0
