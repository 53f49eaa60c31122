import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lab.gpu_check.__main__ import parse_sizes
from lab.gpu_check.acceptance import ASSUMED
from lab.gpu_check.budget import Planner, Prices, Work, total_seconds
from lab.gpu_check.check import GpuCheckOptions
from lab.gpu_check.engines import OFF, STEERED
from lab.gpu_check.load import build_stream
from lab.gpu_check.parts import PARTS, parse_parts
from lab.gpu_check.run import choose_scale, planned_parts
from lab.gpu_check.shapes import (
    QWEN3_8B,
    SCALES,
    WITHOUT_GPU,
    Device,
    Load,
    UnknownScaleError,
    parse_scale,
)
from lab.gpu_check.small_engines import PLAIN

TEN_MINUTES = 600.0


def options(parts: str, seconds: float = TEN_MINUTES) -> GpuCheckOptions:
    return GpuCheckOptions(
        shape=QWEN3_8B,
        device=Device.GPU,
        parts=parse_parts(parts),
        seconds=seconds,
        output=Path("unused"),
    )


@pytest.mark.parametrize("parts", ["exact,costs,graphs,rounding", "arms,asleep,switches",
                                   "overhead,outage", "learning"])  # fmt: skip
def test_each_group_of_parts_fits_ten_minutes(parts: str):
    asked = options(parts)
    scale = choose_scale(asked)
    assert total_seconds(planned_parts(asked, scale)) <= TEN_MINUTES


def test_more_time_is_used_for_more():
    names = [choose_scale(options("exact,costs", seconds)).name for seconds in (1, 400, 3600)]
    order = [scale.name for scale in SCALES]
    assert names[0] == order[-1]
    assert names[-1] == order[0]
    assert order.index(names[0]) >= order.index(names[1]) >= order.index(names[2])


def test_a_scale_that_was_asked_for_is_taken():
    asked = replace(options("all", 60.0), scale=parse_scale("half"))
    assert choose_scale(asked).name == "half"
    with pytest.raises(UnknownScaleError, match="full, half, quarter, least"):
        parse_scale("tiny")


def test_a_processor_has_a_scale_of_its_own():
    for device in (Device.EMULATED, Device.CPU):
        assert choose_scale(replace(options("all"), device=device)) is WITHOUT_GPU[device]


def test_smaller_scales_are_cheaper_part_by_part():
    asked = options("all")
    for larger, smaller in pairwise(SCALES):
        for more, less in zip(
            planned_parts(asked, larger), planned_parts(asked, smaller), strict=True
        ):
            assert less.seconds <= more.seconds, (more, less)


def test_fewer_graph_sizes_make_the_plan_cheaper():
    asked = options("costs,graphs")
    few = replace(asked, graph_sizes=(1, 16))
    for more, less in zip(
        planned_parts(asked, SCALES[0]), planned_parts(few, SCALES[0]), strict=True
    ):
        assert less.seconds < more.seconds, (more, less)


def test_an_engine_that_runs_is_not_started_again():
    planner = Planner(QWEN3_8B, SCALES[-1], Device.GPU)
    assert planner.count_starts(STEERED).launches == 1
    assert planner.count_starts(STEERED, OFF).launches == 1
    assert planner.count_starts(STEERED, OFF) == Work()
    assert planner.count_starts(PLAIN).launches == 1
    assert planner.count_starts(STEERED).launches == 1


def test_a_table_is_measured_once():
    asked = options("costs,arms")
    both = total_seconds(planned_parts(asked, SCALES[-1]))
    arms = total_seconds(planned_parts(options("arms"), SCALES[-1]))
    assert both == pytest.approx(arms)


def test_passes_are_tokens_over_clients_and_what_a_step_gains():
    planner = Planner(QWEN3_8B, SCALES[0], Device.GPU)
    loads = [Load(concurrency=4, requests=8, prompt_tokens=9, new_tokens=100)]
    assert planner.play(loads) == Work(passes=200, requests=8)
    assert planner.play(loads, tokens_a_step=2.5) == Work(passes=80, requests=8)
    assert planner.play(build_stream(QWEN3_8B, loads, 1)) == planner.play(loads)
    gain = sum(ASSUMED["dflash"] ** k for k in range(4))
    assert planner.play(loads, ("dflash", 3)).passes == math.ceil(200 / gain)


def test_every_part_is_planned_and_priced():
    planned = planned_parts(options("all"), SCALES[0])
    assert [part.name for part in planned] == list(PARTS)
    for part in planned:
        assert part.seconds == pytest.approx(Prices.read().seconds(part.work))
        assert part.seconds > 0


@pytest.mark.parametrize("sizes", ["129", "1,0", "1,x", "-1"])
def test_graph_sizes_that_the_shape_does_not_have_are_refused(sizes: str):
    assert parse_sizes("16, 1,128", 128) == (1, 16, 128)
    with pytest.raises(ValueError, match="name batch sizes of 1 to 128"):
        parse_sizes(sizes, 128)
