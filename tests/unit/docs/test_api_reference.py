"""docs/api.md has the whole contract, and `make check` notices when it no longer does."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from speculation.v1 import engine_pb2, errors_pb2, plan_pb2, policy_pb2, service_pb2, training_pb2

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "api.md"
MODULES = (engine_pb2, errors_pb2, plan_pb2, policy_pb2, service_pb2, training_pb2)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/api_reference.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_page_is_what_the_contract_says():
    done = run("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_comment_is_noticed(tmp_path: Path):
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    changed = tmp_path / "proto" / "speculation" / "v1" / "policy.proto"
    text = changed.read_text(encoding="utf-8")
    assert "Ends an override now." in text
    changed.write_text(text.replace("Ends an override now.", "Ends it."), encoding="utf-8")
    done = run("--check", "--source", tmp_path / "proto")
    assert done.returncode == 1
    assert "run python scripts/api_reference.py" in done.stdout
    run("--source", tmp_path / "proto", "--file", tmp_path / "api.md")
    assert "\nEnds it.\n" in (tmp_path / "api.md").read_text(encoding="utf-8")


def test_every_call_message_and_value_is_there_and_every_link_leads_to_it():
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert len(set(headings)) == len(headings)
    for module in MODULES:
        file = module.DESCRIPTOR
        for service in file.services_by_name.values():
            assert {f"{service.name}.{method.name}" for method in service.methods} <= {*headings}
        for message in file.message_types_by_name.values():
            assert message.name in headings
            for field in message.fields:
                assert f"| `{field.name}` | " in text
        for enum in file.enum_types_by_name.values():
            assert all(f"| `{value.name}` | {value.number} | " in text for value in enum.values)
    anchors = {
        re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings
    }
    assert set(re.findall(r"\(#([^)]+)\)", text)) <= anchors
