"""The alert rules, by Prometheus' own tool."""

import re
from pathlib import Path

import yaml

from tests.support.prometheus_server import ALERTS, promtool

RUNBOOKS = ALERTS.parents[2] / "docs" / "alerts.md"
CASES = Path(__file__).parent / "alerts_test.yml"


def anchors_of(text: str) -> set[str]:
    """The headings of a Markdown page, as links name them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_rules_are_clean():
    assert "23 rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", ALERTS)


def test_every_alert_fires_for_who_is_ill_and_for_nobody_else():
    promtool("test", "rules", CASES)


def test_every_alert_has_such_a_case():
    rules = ALERTS.read_text().split("- alert: ")[1:]
    cases = CASES.read_text()
    for rule in rules:
        assert f"alertname: {rule.split()[0]}\n" in cases


def test_every_alert_leads_to_its_section_of_the_runbooks():
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    anchors = anchors_of(RUNBOOKS.read_text())
    for rule in rules:
        address, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert address.rpartition("/")[2] == RUNBOOKS.name
        assert anchor == rule["alert"].lower()
        assert anchor in anchors, rule["alert"]
    assert len(anchors) == len(rules) + 1  # the title
