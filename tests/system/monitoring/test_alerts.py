"""The alert rules, by Prometheus' own tool."""

from pathlib import Path

from tests.support.prometheus_server import ALERTS, promtool

CASES = Path(__file__).parent / "alerts_test.yml"


def test_the_rules_are_clean():
    assert "20 rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", ALERTS)


def test_every_alert_fires_for_who_is_ill_and_for_nobody_else():
    promtool("test", "rules", CASES)


def test_every_alert_has_such_a_case():
    rules = ALERTS.read_text().split("- alert: ")[1:]
    cases = CASES.read_text()
    for rule in rules:
        assert f"alertname: {rule.split()[0]}\n" in cases
