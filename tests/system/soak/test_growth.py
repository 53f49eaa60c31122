"""The judgement itself: what leaks is found, what only moves is not."""

import random
from dataclasses import replace

import pytest

from tools.soak.growth import TOLERANCES, Sample, growths, theil_sen


def life(seconds: float = 1800.0, every: float = 4.5, name: str = "sidecar") -> list[Sample]:
    """Moving load: memory warms up and breathes, connections come and go."""
    rng = random.Random(7)
    samples = []
    for number in range(int(seconds / every)):
        elapsed_seconds = number * every
        warm = min(1.0, elapsed_seconds / (0.2 * seconds))
        clients = rng.choice([0, 1, 4, 16])
        samples.append(
            Sample(
                seconds=elapsed_seconds,
                name=name,
                pid=1,
                memory_megabytes=60 + 30 * warm + rng.uniform(0, 3),
                descriptors=20 + clients,
                threads=12 + (clients > 4),
                sockets=8 + clients,
                log_bytes=int(elapsed_seconds * 50),
            )
        )
    return samples


def too_much(samples: list[Sample]) -> list[str]:
    return [growth.kind for growth in growths(samples) if growth.is_too_much]


def test_load_that_moves_is_no_leak() -> None:
    measured_growths = growths(life())
    assert [growth.kind for growth in measured_growths] == list(TOLERANCES)
    assert not any(growth.is_too_much for growth in measured_growths)
    # Memory is warm at 90 MB.
    assert measured_growths[0].first >= 90


def test_more_and_more_load_with_pauses_in_between_is_no_leak() -> None:
    rising = [
        replace(s, sockets=8 + (0 if number % 5 == 0 else number // 20))
        for number, s in enumerate(life())
    ]
    assert too_much(rising) == []


@pytest.mark.parametrize(
    ("kind", "an_hour"),
    [
        ("memory_megabytes", 60.0),
        ("descriptors", 30),
        ("threads", 30),
        ("sockets", 30),
        ("log_bytes", 5_000_000),
    ],
)
def test_a_slow_leak_under_moving_load_is_found(kind: str, an_hour: float) -> None:
    def leaked(sample: Sample) -> Sample:
        value = getattr(sample, kind)
        return replace(sample, **{kind: type(value)(value + an_hour * sample.seconds / 3600)})

    leaking = list(map(leaked, life()))
    assert too_much(leaking) == [kind]


def test_one_step_up_is_none_while_many_are_one() -> None:
    once = [replace(s, threads=s.threads + (s.seconds > 1000) * 2) for s in life()]
    assert too_much(once) == []
    stairs = [replace(s, threads=s.threads + int(s.seconds // 200)) for s in life()]
    assert too_much(stairs) == ["threads"]


def test_a_process_that_was_started_again_is_judged_by_itself() -> None:
    again = [replace(s, pid=2, seconds=s.seconds + 1800, memory_megabytes=400) for s in life()]
    measured_growths = growths([*life(), *again])
    assert {growth.pid for growth in measured_growths} == {1, 2}
    assert not any(growth.is_too_much for growth in measured_growths)


def test_a_life_that_is_too_short_is_not_judged() -> None:
    assert growths(life(seconds=60.0, every=5.0)) == []


def test_the_slope_is_that_of_most_points() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert theil_sen(times, [0.0, 2.0, 4.0, 999.0, 8.0, 10.0, 12.0]) == pytest.approx(2.0)
