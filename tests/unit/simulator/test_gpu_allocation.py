from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.gpu_allocation import (
    Demand,
    GpuPool,
    InvalidPoolError,
    allocate,
    evaluate_allocation,
)

rates = st.floats(0.1, 20)


@st.composite
def pools(draw: st.DrawFn) -> list[GpuPool]:
    count = draw(st.integers(1, 3))
    return [
        GpuPool(f"p{i}", draw(st.integers(1, 5)), draw(rates), draw(rates)) for i in range(count)
    ]


@given(pools(), st.floats(0.5, 3), st.floats(0.5, 2), st.floats(0.05, 1), st.floats(0, 0.9))
def test_nothing_that_trains_enough_serves_more(gpus, speedup, untrained, share, part):
    needed = part * sum(pool.gpus * pool.training for pool in gpus)
    demand = Demand(speedup, untrained, needed, share)
    allocation = allocate(gpus, demand)
    assert (
        sum(x * p.training for x, p in zip(allocation.training_gpus, gpus, strict=True))
        >= needed * 0.999
    )
    for trains in product(*(range(pool.gpus + 1) for pool in gpus)):
        rate = sum(x * p.training for x, p in zip(trains, gpus, strict=True))
        if any(trains) and rate >= needed:
            assert evaluate_allocation(
                gpus, demand, trains
            ).relative_throughput <= allocation.relative_throughput * (1 + 1e-9)


@given(pools(), st.floats(0.5, 3), st.floats(0.05, 1))
def test_it_pays_above_the_break_even_and_not_below(gpus, speedup, share):
    allocation = allocate(gpus, Demand(speedup, share=share))
    if allocation.break_even_speedup == float("inf"):
        assert allocation.relative_throughput == 0
        return
    again = [
        evaluate_allocation(
            gpus,
            Demand(allocation.break_even_speedup * factor, share=share),
            allocation.training_gpus,
        )
        for factor in (0.999, 1.001)
    ]
    assert [one.is_worthwhile for one in again] == [False, True]


def test_the_card_that_is_old_for_serving_trains():
    old = GpuPool("MI250", 4, 1.0, 1.0)
    allocation = allocate([GpuPool("H100", 8, 6.76, 2.44), old], Demand(1.3, training=4.0))
    assert allocation.training_gpus == (0, 4)
    # As many equal GPUs: nothing favours one kind, and training on them costs more.
    assert not allocate([GpuPool("H100", 2, 1.0, 1.0)], Demand(1.3)).is_worthwhile


def test_a_drafter_that_is_good_already_raises_the_bar():
    gpus = [GpuPool("a", 4, 5.0, 2.0), GpuPool("b", 2, 1.0, 1.0)]
    assert allocate(gpus, Demand(1.3)).is_worthwhile
    assert not allocate(gpus, Demand(1.3, untrained=1.27)).is_worthwhile


def test_training_that_is_rarely_needed_costs_little():
    gpus = [GpuPool("a", 4, 1.0, 1.0)]
    always = allocate(gpus, Demand(1.2))
    seldom = allocate(gpus, Demand(1.2, share=0.1))
    assert always.relative_throughput == pytest.approx(1.2 * 0.75)
    assert seldom.relative_throughput == pytest.approx(1.2 * 0.975)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GpuPool("", 1, 1, 1), "pool ''"),
        (lambda: GpuPool("a", 0, 1, 1), "of 0 GPUs"),
        (lambda: GpuPool("a", 1, 0, 1), "inference rate 0"),
        (lambda: GpuPool("a", 1, 1, float("nan")), "training rate nan"),
        (lambda: Demand(0), "speedup 0"),
        (lambda: Demand(1, untrained=float("inf")), "untrained inf"),
        (lambda: Demand(1, training=-1), "training rate -1"),
        (lambda: Demand(1, share=0), "share 0"),
        (lambda: allocate([], Demand(1)), "no pool of GPUs"),
        (lambda: allocate([GpuPool("a", 1, 1, 1)] * 2, Demand(1)), "named twice"),
        (lambda: allocate([GpuPool("a", 2, 1, 1)], Demand(1, training=3)), "all GPUs together"),
        (
            lambda: allocate([GpuPool(n, 999, 1, 1) for n in "ab"], Demand(1)),
            "count nodes instead of GPUs",
        ),
    ],
)
def test_what_cannot_be_advised_is_refused(make, message):
    with pytest.raises(InvalidPoolError, match=message):
        make()
