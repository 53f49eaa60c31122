"""Budgets end by steps or by time; the learning rate warms up and decays with what is spent."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lab.cpu_engine.models.schedule import LearningRate, StepBudget, train


def test_a_budget_ends_by_steps_on_a_fast_machine() -> None:
    used = list(StepBudget(steps=4, seconds=100).progress(lambda: 0.0))
    assert used == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]


def test_a_budget_ends_by_time_on_a_slow_machine() -> None:
    clock = itertools.count(0, 30)
    used = list(StepBudget(steps=1000, seconds=100).progress(lambda: float(next(clock))))
    assert used == [(0, 0.3), (1, 0.6), (2, 0.9)]


def test_the_rate_warms_up_then_falls_to_its_final_share() -> None:
    rate = LearningRate(peak=1.0, warmup_steps=10, final_share=0.1)
    assert rate.at(0, 0.0) == pytest.approx(0.1)
    assert rate.at(9, 0.0) == pytest.approx(1.0)
    assert rate.at(500, 0.5) == pytest.approx(0.55)
    assert rate.at(999, 1.0) == pytest.approx(0.1)


def test_training_leaves_frozen_parameters_alone() -> None:
    torch.manual_seed(11)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    module[0].requires_grad_(False)
    before = [parameter.clone() for parameter in module.parameters()]
    losses: list[float] = []
    train(
        module,
        lambda _: (module(torch.ones(1, 3)) - 5).square().sum(),
        StepBudget(steps=50, seconds=600),
        LearningRate(peak=0.1, warmup_steps=1),
        on_step=lambda _, loss: losses.append(loss),
    )
    frozen, moved = list(module[0].parameters()), list(module[1].parameters())
    assert all(torch.equal(now, then) for now, then in zip(frozen, before[:2], strict=True))
    assert not any(torch.equal(now, then) for now, then in zip(moved, before[2:], strict=True))
    assert losses[-1] < 0.05 * losses[0]
