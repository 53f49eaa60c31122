"""The verification of one token takes the decode kernel, any longer one the kernel for many."""

import json
from pathlib import Path

from tests.support.engine import fork_engine

PROBE = "tests.unit.lab.standin.one_token_probe"
PATIENCE_SECONDS = 240.0
LENGTHS, ROWS = [5, 9], [1, 0]


def test_only_the_verification_of_one_token_is_decoding(tmp_path: Path) -> None:
    asked = json.dumps({"lengths": LENGTHS, "rows": ROWS})
    output_path, log = tmp_path / "found.json", tmp_path / "log"
    probe = fork_engine(PROBE, [asked, output_path.name], tmp_path, {}, log)
    assert probe.wait(PATIENCE_SECONDS) == 0, log.read_text()
    kernels = json.loads(output_path.read_text())
    counting_itself = [length + 1 for length in LENGTHS]
    assert kernels.pop("verify 1") == ["decode", "the table", counting_itself, ROWS]
    assert kernels == {key: ["planned", "extend"] for key in ("verify 2", "extend", "follow")}
