"""The dashboard against Grafana's own model of dashboards: Grafana itself is in no registry."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.prometheus_server import ALERTS
from tests.system.monitoring.grafana_schema import faults

DASHBOARD: dict[str, Any] = json.loads((ALERTS.parent / "dashboard.json").read_text())


def panel(dashboard: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(candidate for candidate in dashboard["panels"] if candidate["type"] == kind)


def test_the_dashboard_is_one():
    assert faults(DASHBOARD) == []


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = DASHBOARD["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for one in panels:
        grid = one["gridPos"]
        cells = {
            (grid["x"] + dx, grid["y"] + dy) for dx in range(grid["w"]) for dy in range(grid["h"])
        }
        assert not cells & taken, one["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (lambda d: d.update(refreshing="30s"), "dashboard.refreshing"),
        (lambda d: d.update(schemaVersion="39"), "dashboard.schema_version"),
        (lambda d: panel(d, "stat")["gridPos"].update(w="4"), ".grid_pos.w"),
        (lambda d: panel(d, "stat")["options"].update(colour="red"), ".options.colour"),
        (lambda d: panel(d, "stat")["options"].update(colorMode="red"), ".options.color_mode"),
        (lambda d: panel(d, "timeseries")["targets"][0].update(legend="x"), ".targets[0].legend"),
        (lambda d: panel(d, "timeseries")["targets"][0].update(expr=1), ".targets[0].expr"),
        (
            lambda d: panel(d, "timeseries")["fieldConfig"]["defaults"]["custom"].update(
                showPoints="sometimes"
            ),
            ".custom.show_points",
        ),
        (lambda d: panel(d, "heatmap")["options"].update(cellGap="wide"), ".options.cell_gap"),
    ],
)  # fmt: skip
def test_a_dashboard_that_grafana_would_not_take_is_noticed(
    damage: Callable[[dict[str, Any]], object], where: str
):
    damaged = copy.deepcopy(DASHBOARD)
    damage(damaged)
    assert [fault for fault in faults(damaged) if where in fault]
