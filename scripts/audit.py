"""Lists known vulnerabilities of what the images install and are built with.

This needs the advisories' service.  pip-audit prints "no known vulnerabilities" even if its
look-ups failed; here a package that it skipped counts as not audited.

Exit codes: 0 no vulnerability is known, 1 some are known, 3 not every package could be audited.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements" / "lock"

VULNERABLE = 1
NOT_AUDITED = 3


@dataclass
class Findings:
    """The results of the locks' audits.

    audited_count: number of packages that were audited.  vulnerabilities: one line for each
    vulnerability.  skipped: names of packages that pip-audit skipped.
    """

    audited_count: int = 0
    vulnerabilities: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, answer: dict[str, Any]) -> None:
        """Adds pip-audit's JSON answer for one lock."""
        for package in answer["dependencies"]:
            if "skip_reason" in package:
                self.skipped.append(package["name"])
                continue
            self.audited_count += 1
            for vulnerability in package["vulns"]:
                fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
                self.vulnerabilities.append(
                    f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in "
                    f"{fixed}"
                )

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.vulnerabilities:
            return VULNERABLE
        return NOT_AUDITED if self.skipped or not self.audited_count else 0


def audit(lock: Path) -> dict[str, Any] | str:
    """Returns pip-audit's answer, or the reason why there is none."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pip_audit", "--requirement", lock, "--require-hashes",
            "--disable-pip", "--format", "json", "--progress-spinner", "off",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        return (done.stderr.strip().splitlines() or ["pip-audit printed nothing"])[-1]
    return answer


def main() -> int:
    """Prints the vulnerabilities and returns the exit code."""
    findings = Findings()
    for lock in sorted(LOCKS.glob("*.txt")):
        answer = audit(lock)
        if isinstance(answer, str):
            print(f"audit: {lock.name} could not be audited: {answer}", file=sys.stderr)
            return NOT_AUDITED
        findings.add(answer)
    for line in findings.vulnerabilities:
        print(f"audit: {line}", file=sys.stderr)
    if findings.skipped:
        print(
            f"audit: NOT AUDITED: the advisories' service did not answer for "
            f"{len(findings.skipped)} packages ({', '.join(sorted(set(findings.skipped)))}). "
            "Check that it can be reached from here.",
            file=sys.stderr,
        )
    if findings.exit_code == 0:
        print(f"audit: no known vulnerability in {findings.audited_count} pinned packages")
    return findings.exit_code


if __name__ == "__main__":
    sys.exit(main())
