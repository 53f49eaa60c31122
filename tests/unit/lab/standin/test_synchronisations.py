"""The list of what waits names the plugin's lines, and only those that wait on a GPU."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cpu_graphs.synchronisations import Synchronisations

from engine_shim.sglang.api.transfer import to_device


def run_as(path: str, source: str) -> Callable[..., object]:
    """The function `f` of a module that lies at `path`; its lines can be looked up there."""
    names: dict[str, object] = {"torch": torch}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(source)
    exec(compile(source, path, "exec"), names)
    function = names["f"]
    assert callable(function)
    return function


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return x.tolist()", "tolist"),
        ("return x[[0]]", "indexing with a list"),
        ("return x[x > 0]", "indexing with a mask"),
        ("return torch.tensor([1], device=x.device)", "tensor(list"),
        ("return x.cpu()", "cpu"),
        ('return x.to("cpu")', "to('cpu')"),
        ("return x.repeat_interleave(x)", "repeat_interleave"),
        ("seq_lens_cpu = x; return seq_lens_cpu.tolist()", ""),
        ("device = 'cpu'\n    return x.to(device)", ""),
        ("return x * 2", ""),
    ],
)
def test_a_line_of_the_plugin_that_waits_is_named(body: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "engine_shim/sglang/module.py"
    function = run_as(str(path), f"def f(x):\n    {body}\n")
    ledger = tmp_path / "found.json"
    with Synchronisations(str(ledger)) as waits:
        for _ in range(3):
            function(torch.ones(1, dtype=torch.int64))
    if not reason:
        assert not waits.counts
        return
    [(entry, count)] = waits.counts.items()
    assert reason in entry
    assert entry.startswith("module.py f: ")
    assert count == 3
    # Written at powers of two.
    assert json.loads(ledger.read_text()) == {entry: 2}


def test_waits_of_sglang_are_its_own_but_in_passes_that_the_plugin_adds(tmp_path: Path) -> None:
    sglang = run_as(str(tmp_path / "sglang/worker.py"), "def f(x):\n    return x.tolist()\n")
    source = "def f(x):\n    def around_step(g): return g(x)\n    def extra(g): return g(x)\n"
    shim = run_as(
        str(tmp_path / "engine_shim/sglang/hook.py"), source + "    return around_step, extra\n"
    )
    pair = shim(torch.ones(1))
    assert isinstance(pair, tuple)
    around, extra = pair
    with Synchronisations(str(tmp_path / "found.json")) as waits:
        around(sglang)
        assert not waits.counts
        extra(sglang)
    assert "worker.py:2" in next(iter(waits.counts))


def test_lists_go_to_the_device_without_a_wait(tmp_path: Path) -> None:
    with Synchronisations(str(tmp_path / "found.json")) as waits:
        assert to_device([3, 1], "cpu").tolist() == [3, 1]
        assert to_device([3], "cpu", torch.int32).dtype == torch.int32
    assert not [entry for entry in waits.counts if "transfer.py" in entry]
