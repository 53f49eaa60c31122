"""Asks for known vulnerabilities of what the images install and are built with.

The service of advisories has to be reached.  A package that it was not asked about is never
counted as well: pip-audit says "no known vulnerabilities" where it could look nothing up.

Exit codes: 0 nothing is known of any package, 1 something is, 3 not every one could be asked about.
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
NOT_ASKED = 3


@dataclass
class Findings:
    """known: one line for each vulnerability.  silent: packages that nothing was said about."""

    asked: int = 0
    known: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)

    def add(self, answer: dict[str, Any]) -> None:
        """Of one lock, as pip-audit writes it."""
        for package in answer["dependencies"]:
            if "skip_reason" in package:
                self.silent.append(package["name"])
                continue
            self.asked += 1
            for found in package["vulns"]:
                fixed = ", ".join(found["fix_versions"]) or "no version yet"
                self.known.append(
                    f"{package['name']} {package['version']}: {found['id']}, mended in {fixed}"
                )

    @property
    def code(self) -> int:
        """What the command ends with."""
        if self.known:
            return VULNERABLE
        return NOT_ASKED if self.silent or not self.asked else 0


def audit(lock: Path) -> dict[str, Any] | str:
    """pip-audit's answer, or why there is none."""
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
        return (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return answer


def main() -> int:
    """Says what was found; the exit code is that of the file's head."""
    findings = Findings()
    for lock in sorted(LOCKS.glob("*.txt")):
        answer = audit(lock)
        if isinstance(answer, str):
            print(f"audit: {lock.name} could not be audited: {answer}", file=sys.stderr)
            return NOT_ASKED
        findings.add(answer)
    for line in findings.known:
        print(f"audit: {line}", file=sys.stderr)
    if findings.silent:
        print(
            f"audit: NOT AUDITED: the service of advisories says nothing of {len(findings.silent)} "
            f"packages ({', '.join(sorted(set(findings.silent)))}): can it be reached from here?",
            file=sys.stderr,
        )
    if findings.code == 0:
        print(f"audit: nothing is known of {findings.asked} pins")
    return findings.code


if __name__ == "__main__":
    sys.exit(main())
