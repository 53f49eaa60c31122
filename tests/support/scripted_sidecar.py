"""A sidecar with a script: which arm runs, by the number of reports that have arrived."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final

from lab.harness.sidecar import decoded_rows
from speculation.v1.engine_pb2 import StepReport
from speculation.v1.plan_pb2 import (
    REASON_EXPLOIT,
    REGIME_MODE_COLLECT,
    REGIME_MODE_OFF,
    REGIME_MODE_ONLINE,
    MixtureRule,
    Plan,
    PlanRow,
    Regime,
)
from speculation.v1.service_pb2 import SteerRequest, SteerResponse
from tests.support.eventually import eventually
from tests.support.fake_sidecar import FakeSidecar

_REST_SECONDS: Final = 0.05
_REST_SECONDS_MAX: Final = 2.0

Arm = tuple[int, bool] | tuple[int, bool, int]
"""Draft length, whether the drafter sleeps, and which of the engine's drafters (the first)."""
Script = Callable[[int], Arm]


@dataclass
class ScriptedSidecar:
    """Answers every message with a plan; `arms` keeps what each epoch asked for.

    stride: rounds between online updates, 0 for none.  collect: training signals are kept; a script
    may say so anew for each plan.  collecting: the epochs that asked for it.
    draft_version: of the drafter that is to serve.
    plans_once: only `run` sends a plan, and no message is answered.
    bounds: largest batch of each row of a plan; rows after the first have the script's next arms.
    rules: of the engine's mixtures.
    """

    server: FakeSidecar
    script: Script = lambda _: (3, False)
    lease_ms: int = 60_000
    stride: int = 0
    collect: bool = False
    draft_version: int = 0
    plans_once: bool = False
    bounds: tuple[int, ...] = (64,)
    rules: tuple[MixtureRule, ...] = ()
    arms: dict[int, Arm] = field(default_factory=dict)
    collecting: set[int] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)
    _lost_before: int = 0

    def __post_init__(self) -> None:
        self.server.first_plan = self._next_plan
        self.server.answer = self._answer

    @property
    def variables(self) -> dict[str, str]:
        """What its engine is started with: each report wakes the agent, so that no arm of a script
        is passed over while reports wait to be looked for."""
        return {
            "SPECULATION_SIDECAR": self.server.target,
            "SPECULATION_REPORT_INTERVAL_MS": "0",
        }

    @property
    def reports(self) -> list[StepReport]:
        """All that have arrived, in order."""
        return self.server.reports

    def run(self, script: Script) -> int:
        """Begins a script, counted from now; gives the number of reports before it."""
        self._let_reports_come()
        before = len(self.reports)
        self._lost_before = self._dropped
        self.script = lambda count: script(count - before)
        self.server.push(self._next_plan())
        return before

    def reports_since(self, before: int, rows: int, *, or_lost: bool = False) -> list[StepReport]:
        """The reports after the first `before`, once they cover that many verified rows.

        The rows of requests that had ended are not among them: engines do not count those.
        or_lost: a report that the agent says it has lost since `run` stands for one row, in a test
        whose sessions break off.
        """

        def all_of_them() -> list[StepReport]:
            later = self.reports[before:]
            lost = self._dropped - self._lost_before if or_lost else 0
            return later if sum(map(decoded_rows, later)) + lost >= rows else []

        return eventually(all_of_them, within=90.0, what=f"reports of {rows} rows")

    @property
    def _dropped(self) -> int:
        return sum(request.dropped_reports for request in list(self.server.requests))

    def _let_reports_come(self) -> None:
        """Those of steps that have run; an engine that never rests is not waited for."""
        until = time.monotonic() + _REST_SECONDS_MAX
        came = -1
        while came < len(self.reports) and time.monotonic() < until:
            came = len(self.reports)
            time.sleep(_REST_SECONDS)

    def _answer(self, _: SteerRequest) -> SteerResponse | None:
        return None if self.plans_once else SteerResponse(plan=self._next_plan())

    def _next_plan(self) -> Plan:
        with self._lock:
            epoch = len(self.arms) + 1
            count = len(self.reports)
            chosen = [self.script(count + place) for place in range(len(self.bounds))]
            self.arms[epoch] = chosen[0]
            collect = self.collect
            if collect:
                self.collecting.add(epoch)
        drafters = self.server.introductions[-1].drafters
        rows = [
            PlanRow(
                max_batch_size=bound,
                drafter=drafters[which[0] if which else 0].name,
                gamma=gamma,
                drafter_asleep=asleep,
                reason=REASON_EXPLOIT,
            )
            for bound, (gamma, asleep, *which) in zip(self.bounds, chosen, strict=True)
        ]
        mode = REGIME_MODE_ONLINE if self.stride else REGIME_MODE_OFF
        mode = REGIME_MODE_COLLECT if collect else mode
        return Plan(
            epoch=epoch,
            rows=rows,
            regime=Regime(mode=mode, stride=self.stride),
            lease_ms=self.lease_ms,
            draft_version=self.draft_version,
            reason=REASON_EXPLOIT,
            rules=self.rules,
        )


@contextmanager
def scripted_sidecar(folder: Path) -> Iterator[ScriptedSidecar]:
    """A sidecar on a unix socket in `folder`."""
    with FakeSidecar(f"unix:{folder / 'sidecar.sock'}") as server:
        yield ScriptedSidecar(server)
