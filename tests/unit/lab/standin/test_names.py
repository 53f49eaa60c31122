"""What SGLang finds by name, and what it must not find."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import sgl_kernel
import torch
from sgl_kernel import _registry

from lab.cpu_engine.environment import STANDIN_FOLDER


def test_operators_are_reachable_both_ways() -> None:
    assert torch.ops.sgl_kernel.decode_attention_cpu is sgl_kernel.decode_attention_cpu
    assert torch.ops.sgl_kernel.weight_packed_linear is sgl_kernel.weight_packed_linear


@pytest.mark.parametrize("name", ["fused_qk_norm_cpu", "fused_qk_norm_rope_cpu"])
def test_names_that_sglang_probes_stay_absent(name: str) -> None:
    assert not hasattr(torch.ops.sgl_kernel, name)
    assert name not in _registry.LOOKED_UP_AT_IMPORT


@pytest.mark.parametrize("name", _registry.LOOKED_UP_AT_IMPORT)
def test_a_placeholder_can_be_looked_up_but_not_called(name: str) -> None:
    placeholder = getattr(torch.ops.sgl_kernel, name)
    assert name in repr(placeholder)
    with pytest.raises(sgl_kernel.MissingOperatorError, match=f"{name} has no CPU stand-in"):
        placeholder(torch.zeros(1), flag=True)


@pytest.mark.parametrize("module", ["sgl_kernel", "sgl_kernel.kvcacheio", "sgl_kernel.mamba"])
def test_any_other_operator_imports_and_fails_when_called(module: str) -> None:
    operator = importlib.import_module(module).transfer_everything
    with pytest.raises(sgl_kernel.MissingOperatorError, match="transfer_everything"):
        operator()
    assert not hasattr(importlib.import_module(module), "__wrapped__")


def test_more_than_two_ranks_are_refused() -> None:
    sgl_kernel.initialize(1, 0)
    sgl_kernel.initialize(2, 1)
    with pytest.raises(ValueError, match="exactly over 2 ranks: --tp-size is 3"):
        sgl_kernel.initialize(3, 0)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The torchvision stub, for the length of a test."""
    before = {name for name in sys.modules if name.split(".")[0] == "torchvision"}
    if before:
        pytest.skip("a real torchvision is imported already")
    monkeypatch.syspath_prepend(str(STANDIN_FOLDER))
    yield importlib.import_module("torchvision")
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "module",
    ["io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"],
)
def test_torchvision_imports_and_fails_when_used(stub: ModuleType, module: str) -> None:
    name = importlib.import_module(f"torchvision.{module}").decode_or_resize
    for use in (lambda: name("image"), lambda: name.BICUBIC):
        with pytest.raises(NotImplementedError, match="install torchvision"):
            use()
    assert not hasattr(name, "__wrapped__")


def test_torchvision_has_the_enumeration_that_is_read_at_import(stub: ModuleType) -> None:
    transforms = importlib.import_module("torchvision.transforms")
    assert transforms.InterpolationMode.BICUBIC.value == "bicubic"
    assert transforms.v2.InterpolationMode is transforms.InterpolationMode
