"""`make audit` never passes for want of an answer."""

import os
import subprocess
import sys
from typing import Any

import pytest

from scripts.audit import NOT_AUDITED, VULNERABLE, Findings
from tests.unit.packaging.environments import ROOT

FINE = {"name": "numpy", "version": "2.4.6", "vulns": []}
SILENT = {"name": "redis", "skip_reason": "Dependency not found"}
ILL = {
    "name": "rich", "version": "1.0",
    "vulns": [{"id": "CVE-1", "fix_versions": ["1.1"]}, {"id": "CVE-2", "fix_versions": []}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("packages", "code"),
    [
        ([FINE], 0),
        ([FINE, SILENT], NOT_AUDITED),
        ([], NOT_AUDITED),
        ([FINE, ILL], VULNERABLE),
        ([SILENT, ILL], VULNERABLE),
    ],
)
def test_only_an_answer_for_every_package_is_a_pass(packages: list[dict[str, Any]], code: int):
    findings = Findings()
    findings.add({"dependencies": packages})
    assert findings.exit_code == code


def test_each_vulnerability_is_named_with_its_cure():
    findings = Findings()
    findings.add({"dependencies": [ILL]})
    assert findings.vulnerabilities == [
        "rich 1.0: CVE-1, fixed in 1.1", "rich 1.0: CVE-2, fixed in no version yet"
    ]  # fmt: skip


def test_without_a_network_it_says_so_and_ends_with_a_code_of_its_own():
    nowhere = "http://127.0.0.1:9"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "audit.py"],
        env=os.environ | {"HTTPS_PROXY": nowhere, "https_proxy": nowhere, "NO_PROXY": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == NOT_AUDITED
    assert "AUDITED" in done.stderr.upper()
    assert not done.stdout
