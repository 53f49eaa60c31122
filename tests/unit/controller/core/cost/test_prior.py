"""An engine without a profile is priced by its shape, or by a guess that is named as one."""

import dataclasses

import numpy as np
import pytest

from controller.core.clock import VirtualClock
from controller.core.cost.table import select_prior
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import (
    DrafterKind,
    DrafterShape,
    GroupedQueryAttention,
    ModelShape,
)
from controller.core.plan import Reason
from controller.core.settings import PlannerSettings
from controller.wire.explanations import explain

GAMMAS = (0, 1, 3, 7)
ARMS = [Arm("mtp", g) for g in GAMMAS]
SIZES = (1, 8, 64, 256)
# About an 8B dense model and a one-layer MTP head of it.
TARGET = ModelShape(
    hidden_size=4096,
    vocabulary_size=128_256,
    attention=((GroupedQueryAttention(32, 8, 128), 32),),
    dense_params=6_979_000_000,
)
DRAFTER = DrafterShape(DrafterKind.MTP, dense_params=218_000_000)


def spec(device="NVIDIA H200", shape=TARGET, drafter=DRAFTER):
    return EngineSpec(
        "e", Fingerprint("m", engine="virtual", device=device),
        (DrafterSpec("mtp", DrafterKind.MTP, GAMMAS, shape=drafter),), 256, shape=shape,
    )  # fmt: skip


def test_known_shapes_on_a_known_gpu_are_priced_by_the_roofline():
    prior = select_prior(spec(), ARMS, SIZES)
    assert prior.name == "roofline"
    # A plain step at B = 1 reads the weights once: 16 GB at 4.8 TB/s, and overheads.
    assert 0.003 < prior.grid[0, 0] < 0.006
    assert prior.seconds_per_kv_token > 0
    assert np.all(np.diff(prior.grid, axis=0) >= 0)
    assert np.all(np.diff(prior.grid, axis=1) >= 0)


@pytest.mark.parametrize(
    "unknown",
    [
        spec(device="Abacus 3000"),
        spec(device=""),
        spec(shape=None),
        spec(drafter=None),
        # A block of 4 cannot draft 7.
        spec(drafter=DrafterShape(DrafterKind.DFLASH, dense_params=10**8, block_size=4)),
        # Every number could be, but not together.
        spec(shape=dataclasses.replace(TARGET, bytes_per_weight=1e308)),
        spec(shape=dataclasses.replace(TARGET, dense_params=2**64)),
    ],
)
def test_anything_unknown_falls_back_to_the_guess(unknown):
    prior = select_prior(unknown, ARMS, SIZES)
    assert prior.name == "generic"
    assert np.all(prior.grid > 0)


def test_a_gpu_of_half_the_speed_takes_twice_as_long():
    slow, fast = (select_prior(spec(device=d), ARMS, SIZES).grid for d in ("NVIDIA A100", "H200"))
    assert np.all(slow > fast)


@pytest.mark.parametrize("shape", [TARGET, None])
def test_decisions_from_a_prior_say_so_and_say_which(shape):
    controller = EngineController(spec(shape=shape), PlannerSettings(), None, VirtualClock())
    plan = controller.current_plan()
    name = "roofline" if shape else "generic"
    assert plan.reason is Reason.PROFILE_MISSING
    assert f"costs from a {name} prior" in plan.reason_detail
    assert explain(controller).prior == name


def test_the_roofline_knows_that_drafting_is_cheap_at_one_and_dear_at_many():
    grid = select_prior(spec(), ARMS, SIZES).grid
    ratio = grid[2] / grid[0]
    assert ratio[0] < 1.4
    assert ratio[-1] > ratio[0] + 0.3
