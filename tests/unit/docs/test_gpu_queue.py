"""The queue of docs/gpu.md: its commands fit into their limits, and into each other."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lab.gpu_check.parts import PARTS, parse_parts

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- (step|run) (\d) -->\n```\n(.+)\n```")
# Most seconds of one command on a borrowed machine.
LONGEST = 600
# What a job needs to end in time: the check stops, 20 s of grace, results are copied.
ENDING = 30


def blocks(kind: str) -> dict[int, str]:
    return {
        int(number): text for block_kind, number, text in BLOCK.findall(PAGE) if block_kind == kind
    }


RUNS = blocks("run")


def test_every_prepared_run_has_a_command_and_a_row_with_its_limit():
    queue = PAGE.partition("## The queue\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| \[?(\d)[^|]*\|[^|]+\| ([^|]*)\| (\w+)", queue, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == [1, 2, 3, 4, 5, 6]
    prepared = {int(number): limit for number, limit, status in rows if status != "prepared"}
    assert set(prepared) == set(RUNS) == {1, 2, 3}
    for number, limit in prepared.items():
        assert shlex.split(RUNS[number])[2] == limit.removesuffix(" s ")
    assert set(blocks("step")) == {1, 2}


@pytest.mark.parametrize("number", RUNS)
def test_a_run_ends_within_its_limit_and_the_limit_within_the_longest(number: int):
    bash, script, limit, _, *command = shlex.split(RUNS[number])
    assert [bash, Path(script).name] == ["bash", "job.sh"]
    budget = 60 * float(command[command.index("--minutes") + 1])
    assert budget + ENDING <= int(limit)
    assert int(limit) + ENDING <= LONGEST


def test_the_runs_have_names_of_their_own_and_engines_of_one_kind():
    commands = [shlex.split(command) for command in RUNS.values()]
    assert len({command[3] for command in commands}) == len(commands)
    assert len({tuple(command[command.index("--") :]) for command in commands}) == 1


def test_the_page_explains_every_part_and_names_no_other():
    explained = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert explained == list(PARTS)
    named = re.findall(r"--parts ([\w,]+)", PAGE)
    assert named
    for parts_text in named:
        assert parse_parts(parts_text)


@pytest.mark.parametrize("number", RUNS)
def test_what_a_run_is_planned_to_take_is_within_its_budget(number: int):
    module, options = re.findall(r"python3 -m (\S+) (.+)", RUNS[number])[0]
    planned = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, "--plan", *shlex.split(options)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (seconds,) = re.findall(r"(?:Together|│ sum)\D+(\d+)", planned)
    budget = 60 * float(re.findall(r"--minutes ([\d.]+)", options)[0])
    assert 0 < float(seconds) < budget
