"""A drafter that learns on a device whose copies to and from the host happen late."""

from collections.abc import Callable, Iterator

import pytest
import torch

from engine_shim.sglang.api import transfer
from engine_shim.sglang.learning.online_weights import ChangeOutcome, OnlineWeights
from engine_shim.sglang.learning.student import live_drafter
from tests.support import late_copies
from tests.support.live_drafters import LlamaForCausalLMEagle3, worker_of
from tests.support.training_rounds import make_student, make_target
from tests.unit.engine_shim.sglang.learning import test_online_updates as elsewhere
from tests.unit.engine_shim.sglang.learning.test_online_updates import Driver

# Events have to be asked for so often, once a step and more.
ASKS = 4


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    late_copies.install(ASKS, monkeypatch.setattr)
    fresh_driver = Driver(monkeypatch, LEARNING_RATE="0.01")
    fresh_driver.request("first")
    yield fresh_driver
    fresh_driver.online.close()


@pytest.mark.parametrize(
    "check",
    [
        elsewhere.test_it_learns_once_it_knows_what_it_would_be_compared_with,
        elsewhere.test_it_learns_from_rounds_without_drafts_as_well,
        elsewhere.test_weights_that_somebody_else_has_set_stay,
        elsewhere.test_a_fall_puts_the_last_good_weights_back,
        elsewhere.test_what_nobody_has_judged_goes_with_the_trainer,
    ],
)
def test_what_holds_on_a_cpu_holds_there(check: Callable[[Driver], None], driver: Driver) -> None:
    check(driver)


def test_what_lands_is_what_the_trainer_has_made(driver: Driver) -> None:
    driver.await_condition(lambda: driver.counters.updates > 0)
    # No further one is requested, so that the trainer's memory stays as it is.
    for _ in range(2 * ASKS):
        driver.step(2, stride=0)
    driver.await_condition(lambda: driver.online.can_be_stored, stride=0)
    trained_weights = driver.online._trainer.weights
    assert trained_weights
    for name, part in trained_weights.items():
        assert torch.equal(driver.model.get_parameter(name), part), name
    # While the next ones are on their way, these will not serve for long.
    driver.await_condition(lambda: driver.online._pending_copy is not None)
    assert not driver.online.can_be_stored


def test_what_was_written_unseen_is_told_also_after_what_was_learnt_was_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late_copies.install(ASKS, monkeypatch.setattr)
    model = LlamaForCausalLMEagle3(make_student(make_target()))
    side = transfer.make_side_stream(torch.device("cpu"))
    weights = OnlineWeights(live_drafter(worker_of(model)), per_request=False, side=side)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(0.5)
    assert weights.adopt_served() is ChangeOutcome.DONE
    assert [weights.check_replaced() for _ in range(64 + ASKS)].count(True) == 1
    assert not any(weights.check_replaced() for _ in range(64 + ASKS))


def test_what_serves_after_the_end_may_be_adopted() -> None:
    weights = OnlineWeights(
        live_drafter(worker_of(LlamaForCausalLMEagle3(make_student(make_target())))),
        per_request=False,
    )
    assert (
        weights.apply_trained({n: part + 1 for n, part in weights.copy().items()}, 0)
        is ChangeOutcome.DONE
    )
    weights.end_updates(restores=False)
    assert weights.has_changed
    assert weights.adopt_served(is_external=True) is ChangeOutcome.NOTHING
    assert not weights.has_changed


def test_what_the_trainer_is_given_is_what_served_when_it_was_asked_to_take_it(
    driver: Driver,
) -> None:
    driver.await_condition(lambda: driver.counters.updates > 0)
    driver.await_condition(lambda: driver.counters.restored == 1, accepted=1)
    driver.await_condition(lambda: driver.online._pending_copy is not None, stride=0)
    served_weights = {name: part.detach().clone() for name, part in driver.model.named_parameters()}
    with torch.no_grad():
        for parameter in driver.model.parameters():
            parameter.mul_(0.5)
    driver.await_condition(lambda: driver.online._pending_copy is None, stride=0)
    for name, part in driver.online._trainer.weights.items():
        assert torch.equal(part, served_weights[name]), name


def test_what_somebody_writes_while_weights_are_on_their_way_stays(driver: Driver) -> None:
    driver.await_condition(lambda: driver.counters.updates > 2)
    # The trainer has answered, and its weights have not landed yet.
    driver.await_condition(lambda: driver.online._pending_copy is not None)
    with torch.no_grad():
        for parameter in driver.model.parameters():
            parameter.mul_(0.5)
    other_weights = driver.weights()
    for _ in range(2 * ASKS):
        driver.step(2, stride=0)
    assert driver.online._pending_copy is None
    assert torch.equal(driver.weights(), other_weights)
    driver.await_condition(lambda: driver.counters.replaced == 1, stride=0)
    # The trainer continues from there.
    updates = driver.counters.updates
    driver.await_condition(lambda: driver.counters.updates > updates + 2)
    assert (driver.weights() - other_weights).abs().max() < 0.2 * other_weights.abs().max()


def test_a_version_that_is_put_in_its_place_is_what_it_continues_from(driver: Driver) -> None:
    driver.await_condition(lambda: driver.counters.updates > 2)
    with torch.no_grad():
        for name, parameter in driver.model.named_parameters():
            # That is the target's.
            if name != "model.embed_tokens.weight":
                parameter.mul_(0.5)
    other_weights = driver.weights()
    driver.online.on_external_weights()
    assert driver.counters.replaced == 1
    assert torch.equal(driver.weights(), other_weights)
    updates = driver.counters.updates
    driver.await_condition(lambda: driver.counters.updates > updates + 2)
    assert (driver.weights() - other_weights).abs().max() < 0.2 * other_weights.abs().max()
    assert driver.counters.replaced == 1
