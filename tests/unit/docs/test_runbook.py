"""Each incident of docs/runbook.md says what one sees, what to type, and what it costs."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
ALERTS = {
    rule["alert"]
    for group in yaml.safe_load((ROOT / "deploy" / "monitoring" / "alerts.yml").read_text())[
        "groups"
    ]
    for rule in group["rules"]
    if "alert" in rule
}
INCIDENTS = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]


def test_there_are_ten() -> None:
    assert [incident.split(".")[0] for incident in INCIDENTS] == [str(n) for n in range(1, 11)]


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda text: text.splitlines()[0])
def test_an_incident_has_its_three_parts_and_a_command(incident: str) -> None:
    parts = [incident.index(f"**{name}**") for name in ("You see", "You type", "It costs")]
    assert parts == sorted(parts)
    block = re.search(r"^```\n(.*?)^```", incident[parts[1] : parts[2]], re.MULTILINE | re.DOTALL)
    assert block
    # test_docs.py checks the commands themselves.
    assert "controller " in block.group(1)


def test_alerts_are_named_as_they_are() -> None:
    named = set(re.findall(r"\[(Speculation\w+)\]", TEXT))
    assert named
    assert named <= ALERTS
    for name in named:
        assert f"[{name}](alerts.md#{name.lower()})" in TEXT
