"""Data that moves between host and device, and between streams."""

from typing import Any

import pytest
import torch

from engine_shim.sglang.api import transfer
from engine_shim.sglang.learning.student import DrafterWeights
from tests.support import late_copies


class OtherStreamsTensor(torch.Tensor):
    """A tensor on the host that says it lies on a GPU, and keeps which streams were recorded."""

    recorded: list[Any]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Streams:
        @staticmethod
        def current_stream(device: torch.device) -> str:
            return f"the forward stream of {device}"

    monkeypatch.setattr(torch, "get_device_module", lambda _: Streams)


def made_elsewhere() -> OtherStreamsTensor:
    tensor = torch.ones(3).as_subclass(OtherStreamsTensor)
    tensor.recorded = []
    return tensor


def test_memory_of_another_stream_is_kept_for_this_one() -> None:
    tensor = made_elsewhere()
    transfer.protect_from_reuse(tensor)
    assert tensor.recorded == ["the forward stream of cuda:0"]


def test_memory_of_the_host_needs_no_stream() -> None:
    transfer.protect_from_reuse(torch.ones(3))


def test_a_version_of_a_drafter_is_kept_until_its_copies_are_over() -> None:
    live, version = torch.zeros(3), made_elsewhere()
    DrafterWeights({"a": live}).serve({"a": version})
    assert live.tolist() == [1, 1, 1]
    assert version.recorded == ["the forward stream of cuda:0"]


def test_a_list_becomes_a_tensor() -> None:
    tensor = transfer.to_device([3, 1], "cpu", torch.int32)
    assert (tensor.tolist(), tensor.dtype) == ([3, 1], torch.int32)


def test_a_part_that_is_not_contiguous_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    late_copies.install(1, monkeypatch.setattr)
    side = transfer.make_side_stream(torch.device("cpu"))
    assert side is not None
    whole = torch.zeros(2, 4)
    for pair in ((whole[:, :3], torch.ones(2, 3)), (torch.ones(2, 3), whole[:, :3])):
        with pytest.raises(ValueError, match="only contiguous tensors"):
            side.copy([pair])
    side.copy([(whole, torch.ones(2, 4))]).synchronize()
    assert whole.eq(1).all()
