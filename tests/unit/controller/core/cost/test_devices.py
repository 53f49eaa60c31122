"""A driver's name finds the data sheet of that GPU and of no other."""

from dataclasses import replace

import pytest

from controller.core.cost.roofline import DATA_SHEETS, Device, device_from_data_sheet
from controller.core.model_shapes import InvalidShapeError


@pytest.mark.parametrize(
    ("name", "teraflops", "gigabytes"),
    [
        ("NVIDIA B200", 2250, 8000),
        ("NVIDIA GB200", 2500, 8000),
        ("NVIDIA H200", 989, 4800),
        ("NVIDIA GH200 480GB", 989, 4000),
        ("NVIDIA H100 80GB HBM3", 989, 3350),
        ("NVIDIA H100 PCIe", 756, 2000),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100-PCIE-40GB", 312, 1555),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA L40S", 362, 864),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA A10G", 70, 600),
        ("NVIDIA GeForce RTX 4090", 165, 1008),
        ("AMD Instinct MI300X", 1307, 5300),
    ],
)
def test_a_driver_name_finds_its_data_sheet(name, teraflops, gigabytes):
    data_sheet = device_from_data_sheet(name)
    assert data_sheet.peak_flops == pytest.approx(teraflops * 1e12)
    assert data_sheet.bandwidth == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize("name", ["", "cpu", "NVIDIA RTX A1000", "NVIDIA H2000"])
def test_an_unknown_device_is_refused_and_the_known_ones_are_listed(name):
    with pytest.raises(InvalidShapeError, match="H100 PCIE") as caught:
        device_from_data_sheet(name)
    assert all(key in str(caught.value) for key in DATA_SHEETS)


def test_every_entry_finds_itself_and_not_a_shorter_one():
    for key in DATA_SHEETS:
        assert device_from_data_sheet(f"Maker {key.lower()}") == replace(
            device_from_data_sheet(key), name=f"Maker {key.lower()}"
        )
    assert device_from_data_sheet("NVIDIA H100 NVL") != replace(
        device_from_data_sheet("NVIDIA H100"), name="NVIDIA H100 NVL"
    )


def test_several_gpus_are_faster_and_have_the_same_ridge():
    one, four = (
        device_from_data_sheet("H100"),
        device_from_data_sheet("H100").with_tensor_parallel(4),
    )
    assert four.bandwidth == 4 * one.bandwidth
    assert four.ridge == pytest.approx(one.ridge)
    with pytest.raises(InvalidShapeError, match="over 0 GPUs"):
        one.with_tensor_parallel(0)


def test_a_data_sheet_has_no_overheads_until_they_are_asked_for():
    plain = device_from_data_sheet("H100")
    assert plain.step_overhead_seconds == plain.pass_overhead_seconds == 0
    typical = plain.with_typical_overheads()
    assert 0 < typical.pass_overhead_seconds < typical.step_overhead_seconds < 0.01


@pytest.mark.parametrize(
    ("numbers", "fault"),
    [
        ((0.0, 1.0), "peak_flops 0.0"),
        ((1.0, float("nan")), "bandwidth nan"),
        ((1.0, 1.0, -1.0), "step_overhead_seconds -1.0"),
    ],
)
def test_a_device_that_cannot_be_is_refused(numbers, fault):
    with pytest.raises(InvalidShapeError, match=fault):
        Device("made up", *numbers)
