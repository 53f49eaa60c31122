"""Runs the README's commands for an incident one after the other against a real sidecar."""

import re
import shlex
from pathlib import Path

from tests.support.linked_engine import linked_engine
from tests.support.sidecar_process import controller, sidecar_process

README = Path(__file__).resolve().parents[3] / "README.md"
ENGINE = "pod-7:30000"


def lines() -> list[list[str]]:
    text = README.read_text(encoding="utf-8")
    block = text.split("## During an incident", 1)[1].split("```", 2)[1]
    split_lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [words[1:] for words in split_lines if words]


def test_they_do_what_they_say(tmp_path: Path) -> None:
    record = tmp_path / "record"
    environment = {"CONTROLLER_RECORD_DIRECTORY": str(record), "CONTROLLER_READY_WITH": "guess"}
    commands = lines()
    assert [words[0] for words in commands] == [
        "doctor", "engines", "explain", "override", "override", "report",
    ]  # fmt: skip
    with (
        sidecar_process(tmp_path, environment=environment) as sidecar,
        linked_engine(sidecar.address, ENGINE) as engine,
    ):
        engine.run(60)
        override_id = ""
        for words in commands:
            asked = [override_id if word == "ID" else word for word in words]
            if words[0] == "report":
                asked = [
                    str(record) if word == "record" else str(tmp_path / word)
                    if word == "ticket.html" else word
                    for word in asked
                ]  # fmt: skip
            done = controller(*asked, environment={"CONTROLLER_ADDRESS": sidecar.address})
            if words[0] == "doctor":
                # There is no SGLang here, and the output reports it; nothing else is wrong.
                failed = [line for line in done.stdout.splitlines() if line.startswith("fail")]
                assert [line.split(":")[0].split(maxsplit=1)[1] for line in failed] == [
                    "engine HTTP"
                ], done.stdout
                continue
            assert done.returncode == 0, f"{asked}: {done.stdout}{done.stderr}"
            if words[:2] == ["override", "set"]:
                (override_id,) = re.findall(r"^(\S+) lasts", done.stdout, re.MULTILINE)
                engine.run(30)
                assert engine.link.choose(4).gamma == 1
            if words[0] in {"engines", "explain"}:
                assert ENGINE in done.stdout
    assert "INC-4711" in (tmp_path / "ticket.html").read_text()
