import json
import os
from pathlib import Path

from lab.gpu_check.parts.costs import PartialTable, cost_table


def write(path: Path, *cells: dict[str, object], modified_ns: int) -> None:
    path.write_text(json.dumps({"cells": cells}))
    os.utime(path, ns=(modified_ns, modified_ns))


def cell(gamma: int, seconds: list[float], context: str = "grid") -> dict[str, object]:
    return {
        "drafter": "eagle3", "gamma": gamma, "batch_size": 2, "context": context,
        "seconds": seconds, "kv_tokens": [1] * len(seconds), "rounds": [0] * len(seconds),
    }  # fmt: skip


def test_cells_are_read_as_they_are_measured(tmp_path: Path):
    path = tmp_path / "partial.json"
    table = PartialTable(path)
    assert table.new_cells() == []
    write(path, cell(0, [0.1, 0.3, 0.2]), cell(1, [0.5]), cell(0, [9.0] * 3, "long"), modified_ns=1)
    (table_cell,) = table.new_cells()
    assert (table_cell["gamma"], table_cell["step_seconds"], table_cell["steps"]) == (0, 0.2, 3)
    assert table.new_cells() == []  # nothing was added
    write(path, cell(0, [0.1, 0.3, 0.2]), cell(1, [0.5] * 3), modified_ns=2)
    assert [one["gamma"] for one in table.new_cells()] == [0, 1]


def test_a_file_that_is_being_replaced_yields_nothing(tmp_path: Path):
    path = tmp_path / "partial.json"
    path.write_text("{")
    assert PartialTable(path).new_cells() == []


def test_a_cell_that_is_missing_is_empty_in_the_table():
    cells = [
        {"drafter": "eagle3", "gamma": 0, "batch_size": 1, "step_seconds": 0.001},
        {"drafter": "dflash", "gamma": 3, "batch_size": 4, "step_seconds": 0.0025},
    ]
    assert cost_table(cells).splitlines() == [
        "| arm | B=1 | B=4 |", "| --- | ---: | ---: |", "| 0 | 1.00 |  |", "| dflash 3 |  | 2.50 |",
    ]  # fmt: skip
