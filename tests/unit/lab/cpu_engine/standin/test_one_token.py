"""The verification of one token takes the decode kernel, any longer one the kernel for many."""

import json
import os
import subprocess
import sys
from pathlib import Path

from lab.cpu_engine.environment import cpu_engine_env

LENGTHS, ROWS = [5, 9], [1, 0]


def test_only_the_verification_of_one_token_is_decoding() -> None:
    found = subprocess.run(
        [sys.executable, Path(__file__).with_name("one_token_probe.py")],
        input=json.dumps({"lengths": LENGTHS, "rows": ROWS}),
        env=cpu_engine_env(os.environ),
        capture_output=True,
        check=True,
        text=True,
    )
    kernels = json.loads(found.stdout.splitlines()[-1])
    counting_itself = [length + 1 for length in LENGTHS]
    assert kernels.pop("verify 1") == ["decode", "the table", counting_itself, ROWS]
    assert kernels == {key: ["planned", "extend"] for key in ("verify 2", "extend", "follow")}
