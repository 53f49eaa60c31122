"""A drafter that learns on a device whose copies to and from the host happen late."""

from collections.abc import Callable, Iterator

import pytest
import torch

from engine_shim.sglang.api import transfer
from engine_shim.sglang.learning.online_weights import OnlineWeights, Outcome
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
    made = Driver(monkeypatch, LEARNING_RATE="0.01")
    made.request("first")
    yield made
    made.online.close()


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
    driver.until(lambda: driver.counters.updates > 0)
    # Nobody asks for a further one, so that the trainer's memory stays as it is.
    for _ in range(2 * ASKS):
        driver.step(2, stride=0)
    driver.until(lambda: driver.online.may_be_stored, stride=0)
    made = driver.online._trainer.weights
    assert made
    for name, part in made.items():
        assert torch.equal(driver.model.get_parameter(name), part), name
    # While the next ones are on their way, these will not serve for long.
    driver.until(lambda: driver.online._copying is not None)
    assert not driver.online.may_be_stored


def test_what_was_written_unseen_is_told_also_after_what_was_learnt_was_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late_copies.install(ASKS, monkeypatch.setattr)
    model = LlamaForCausalLMEagle3(make_student(make_target()))
    side = transfer.side_stream(torch.device("cpu"))
    weights = OnlineWeights(live_drafter(worker_of(model)), per_request=False, side=side)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(0.5)
    assert weights.adopt() is Outcome.DONE
    assert [weights.look() for _ in range(64 + ASKS)].count(True) == 1
    assert not any(weights.look() for _ in range(64 + ASKS))


def test_what_serves_after_the_end_may_be_adopted() -> None:
    weights = OnlineWeights(
        live_drafter(worker_of(LlamaForCausalLMEagle3(make_student(make_target())))),
        per_request=False,
    )
    assert weights.land({n: part + 1 for n, part in weights.copy().items()}, 0) is Outcome.DONE
    weights.end(restores=False)
    assert weights.has_changed
    assert weights.adopt(others=True) is Outcome.NOTHING
    assert not weights.has_changed


def test_what_the_trainer_is_given_is_what_served_when_it_was_asked_to_take_it(
    driver: Driver,
) -> None:
    driver.until(lambda: driver.counters.updates > 0)
    driver.until(lambda: driver.counters.restored == 1, accepted=1)
    driver.until(lambda: driver.online._copying is not None, stride=0)
    given = {name: part.detach().clone() for name, part in driver.model.named_parameters()}
    with torch.no_grad():
        for parameter in driver.model.parameters():
            parameter.mul_(0.5)
    driver.until(lambda: driver.online._copying is None, stride=0)
    for name, part in driver.online._trainer.weights.items():
        assert torch.equal(part, given[name]), name


def test_what_somebody_writes_while_weights_are_on_their_way_stays(driver: Driver) -> None:
    driver.until(lambda: driver.counters.updates > 2)
    # The trainer has answered, and its weights have not landed yet.
    driver.until(lambda: driver.online._copying is not None)
    with torch.no_grad():
        for parameter in driver.model.parameters():
            parameter.mul_(0.5)
    given = driver.weights()
    for _ in range(2 * ASKS):
        driver.step(2, stride=0)
    assert driver.online._copying is None
    assert torch.equal(driver.weights(), given)
    driver.until(lambda: driver.counters.replaced == 1, stride=0)
    # The trainer continues from there.
    updates = driver.counters.updates
    driver.until(lambda: driver.counters.updates > updates + 2)
    assert (driver.weights() - given).abs().max() < 0.2 * given.abs().max()


def test_a_version_that_is_put_in_its_place_is_what_it_continues_from(driver: Driver) -> None:
    driver.until(lambda: driver.counters.updates > 2)
    with torch.no_grad():
        for name, parameter in driver.model.named_parameters():
            # That is the target's.
            if name != "model.embed_tokens.weight":
                parameter.mul_(0.5)
    given = driver.weights()
    driver.online.others_serve()
    assert driver.counters.replaced == 1
    assert torch.equal(driver.weights(), given)
    updates = driver.counters.updates
    driver.until(lambda: driver.counters.updates > updates + 2)
    assert (driver.weights() - given).abs().max() < 0.2 * given.abs().max()
    assert driver.counters.replaced == 1
