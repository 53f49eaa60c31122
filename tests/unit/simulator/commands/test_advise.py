"""`controller advise`, as people type it."""

import subprocess
import sys

import pytest


def advise(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "controller.cli", "advise", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


PAPER = ("--pool", "H100:8:6.76:2.44", "--pool", "MI250:4:1:1", "--training", "4")


def test_it_says_who_trains_and_what_that_gains():
    done = advise(*PAPER, "--speedup", "1.3")
    assert done.returncode == 0
    assert done.stdout == (
        "H100: 0 train, 8 serve\n"
        "MI250: 4 train, 0 serve\n"
        "throughput: 1.210 of all cards serving with no speculation\n"
        "pays from a speedup of 1.074 on; 1.3 is expected\n"
    )


def test_it_says_when_training_does_not_pay():
    done = advise(*PAPER, "--speedup", "1.05")
    assert "advice: let all cards serve, and do not train" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name at least one kind of GPU: --pool NAME:CARDS:INFERENCE:TRAINING, for example"),
        (("--pool", "H100:8"), "NAME:CARDS:INFERENCE:TRAINING is needed"),
        (("--pool", "H100:eight:1:1"), "NAME:CARDS:INFERENCE:TRAINING is needed"),
        (("--pool", "H100:8:0:1"), "inference rate 0.0 must be above 0"),
        ((*PAPER, "--speedup", "nan"), "speedup nan must be above 0"),
    ],
)
def test_bad_input_ends_with_one_line(arguments: tuple[str, ...], message: str):
    done = advise(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
