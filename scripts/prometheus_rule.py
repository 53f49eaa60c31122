"""Writes the alert rules as a PrometheusRule; with --check, only compares."""

import argparse
import sys
from pathlib import Path

import yaml

_DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
ALERTS = _DEPLOY / "monitoring" / "alerts.yml"
RULE = _DEPLOY / "kubernetes" / "monitoring" / "prometheus-rule.yaml"

# Stands in alerts.yml for wherever the documents are published.
RUNBOOKS = "https://docs.example/speculation-controller/alerts.md"

_HEAD = "# Written by scripts/prometheus_rule.py from deploy/monitoring/alerts.yml.\n"


def manifest(runbooks: str = RUNBOOKS) -> str:
    """Returns the text of the whole manifest.  runbooks: address of the page docs/alerts.md."""
    name = "speculation-controller"
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": name,
            # kube-prometheus-stack selects by the name of its Helm release.
            "labels": {"app.kubernetes.io/name": name, "release": "kube-prometheus-stack"},
        },
        "spec": yaml.safe_load(
            ALERTS.read_text(encoding="utf-8").replace(f"{RUNBOOKS}#", f"{runbooks}#")
        ),
    }
    return _HEAD + yaml.safe_dump(rule, sort_keys=False, width=120, allow_unicode=True)


def main() -> int:
    """Writes or compares the manifest; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--file", type=Path, default=RULE, help="by default the one in deploy/")
    parser.add_argument(
        "--runbooks", default=RUNBOOKS, metavar="URL", help="where docs/alerts.md is published"
    )
    arguments = parser.parse_args()
    text = manifest(arguments.runbooks)
    path: Path = arguments.file
    if not arguments.check:
        path.write_text(text, encoding="utf-8")
        return 0
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        print(f"{path.name} is not what the rules say; run python scripts/prometheus_rule.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
