"""The same invariants over real processes and sockets: a seeded walk through what can befall them.

A real agent, a real `controller serve`, and a relay between them that keeps what was issued and
reported; the test is the engine.  Longer, and along another way:

    CONCURRENCY_EVENTS=5000 CONCURRENCY_SEED=7 pytest -s tests/system/concurrency/test_processes.py
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from controller.service.sessions.session import session_tag
from controller.wire.reports import report_from_proto
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import Source, make_safe_default
from engine_shim.link.settings import LinkSettings
from speculation.v1 import policy_pb2, policy_pb2_grpc
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec
from tests.support.sidecar_process import SidecarProcess, sidecar_process
from tests.support.step_reports import send, step_report
from tests.system.concurrency.ledger import Ledger, Step
from tests.system.concurrency.relay import Relay

EVENTS: Final = int(os.environ.get("CONCURRENCY_EVENTS", "40"))
SEED: Final = int(os.environ.get("CONCURRENCY_SEED", "1"))
GRACE_SECONDS: Final = 1.0
LEASE_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 120.0
# Starting one takes a second of processor time.
_EVENTS_PER_SIDECAR: Final = 15


class Walk:
    """An engine that steps, and everything that it can lose."""

    def __init__(self, directory: Path, link: EngineLink, ledger: Ledger, relay: Relay) -> None:
        self._directory = directory
        self._link, self._ledger, self._relay = link, ledger, relay
        self._rng = random.Random(SEED)
        self._sidecar = ExitStack()
        self._serving: SidecarProcess | None = None
        self._stopped: set[int] = set()
        self._seen: tuple[int, int, float] | None = None
        self._step = self._overrides = self._since_sidecar = 0
        self.events: list[str] = []

    def step(self, count: int) -> None:
        """`count` steps, each judged."""
        for _ in range(count):
            size = self._rng.choice([1, 4, 16, 100])
            before = time.monotonic()
            choice = self._link.choose(size)
            after = time.monotonic()
            believed = self._link.plan_follower.plan
            if believed is not None:
                arrival = self._link.plan_follower.lease_end - believed.lease_ms * 1e-3
                seen = (believed.session, believed.epoch, arrival)
                if seen != self._seen:
                    self._seen = seen
                    self._ledger.arrived(believed.session, believed.epoch, arrival, after)
            self._ledger.chosen(choice, size, after, believed, slack=after - before)
            counts = [0] * (choice.gamma + 1)
            counts[min(self._rng.randrange(4), choice.gamma)] = size
            self._step += 1
            self._ledger.stepped(self._step, Step(choice, size, tuple(counts)))
            report = step_report(
                self._step,
                counts,
                choice,
                kv_tokens=size * 512,
                step_seconds=0.01 + 0.001 * choice.gamma,
            )
            send(self._link, report)
            if self._relay.faults:
                raise self._relay.faults[0]

    def befall(self) -> None:
        """One event, drawn."""
        self._since_sidecar += 1
        event = self._rng.choice(
            [
                self.rest, self.rest, self.burst, self.kill_agent, self.stop_agent, self.go_on,
                self.go_on, self.close_socket, self.cut, self.stop_sidecar, self.override,
                self.override, self.reload, self.kill_sidecar, self.end_sidecar,
            ]
        )  # fmt: skip
        self.events.append(event.__name__)
        event()

    def rest(self) -> None:
        """Time without a step."""
        time.sleep(self._rng.choice([0.01, 0.1, LEASE_SECONDS, LEASE_SECONDS + GRACE_SECONDS]))

    def burst(self) -> None:
        """More than the socket holds while it is not read."""
        self.step(600)

    def kill_agent(self) -> None:
        """Another one is started by the link."""
        self._signal(self._link.status().agent_pid, signal.SIGKILL)

    def stop_agent(self) -> None:
        """Until `parse_some`."""
        self._signal(self._link.status().agent_pid, signal.SIGSTOP)

    def stop_sidecar(self) -> None:
        """Until `parse_some`."""
        self._signal(self.serving.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Whoever was stopped."""
        for pid in list(self._stopped):
            self._signal(pid, signal.SIGCONT)

    def close_socket(self) -> None:
        """The engine's end of the socket pair; its agent ends by that."""
        self._link._disconnect("closed by the test")

    def cut(self) -> None:
        """All streams break."""
        self._relay.cut()

    def kill_sidecar(self) -> None:
        """SIGKILL, and another one."""
        self._replace_sidecar(signal.SIGKILL)

    def end_sidecar(self) -> None:
        """SIGTERM: it says its last words, and another one is started."""
        self._replace_sidecar(signal.SIGTERM)

    def reload(self) -> None:
        """SIGHUP."""
        self._signal(self.serving.process.pid, signal.SIGHUP)

    def override(self) -> None:
        """A pin that ends by itself soon."""
        if self.serving.process.pid in self._stopped:
            return
        self._overrides += 1
        pinned = policy_pb2.Override(
            override_id=f"walk-{self._overrides}",
            scope=policy_pb2.Scope(fleet=True),
            rule=policy_pb2.OverrideRule(gamma=self._rng.choice([0, 1, 3])),
            author="operator",
            reason="a test",
        )
        request = policy_pb2.SetOverrideRequest(override=pinned, ttl_seconds=0.7)
        with grpc.insecure_channel(f"unix:{self._directory}/controller-operators.sock") as channel:
            policy_pb2_grpc.PolicyServiceStub(channel).SetOverride(
                request, timeout=_PATIENCE_SECONDS, wait_for_ready=True
            )

    def calm(self) -> None:
        """All continue; then the newest session's plans steer, and the last report is known."""
        self.go_on()

        def is_steered() -> bool:
            self.step(1)
            believed = self._link.plan_follower.plan
            return (
                believed is not None
                and self._link.plan_follower.source is Source.PLAN
                and believed.session == self._ledger.newest[0]
                and self._ledger.last_folded >= self._step - 1
            )

        eventually(
            is_steered,
            timeout_seconds=_PATIENCE_SECONDS,
            description=f"steered after {self.events}",
        )

    @property
    def serving(self) -> SidecarProcess:
        """The sidecar's process."""
        assert self._serving is not None
        return self._serving

    def start_sidecar(self) -> None:
        """On the state that the one before left."""
        config = self._directory / "controller.yaml"
        config.write_text(f"planner:\n  lease_seconds: {LEASE_SECONDS}\n")
        flags = ("--config", str(config))
        log = self._directory / "sidecar.log"
        self._serving = self._sidecar.enter_context(
            sidecar_process(self._directory, *flags, log=log)
        )

    def end(self) -> None:
        """Ends the sidecar."""
        self.go_on()
        self._sidecar.close()

    def _replace_sidecar(self, number: signal.Signals) -> None:
        if self._since_sidecar < _EVENTS_PER_SIDECAR:
            return
        self._since_sidecar = 0
        self.go_on()
        self.serving.stop(number)
        self._sidecar.close()
        self.step(5)
        self.start_sidecar()

    def _signal(self, pid: int | None, number: signal.Signals) -> None:
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if number is signal.SIGSTOP:
            self._stopped.add(pid)
        elif number is not signal.SIGHUP:
            self._stopped.discard(pid)


@contextmanager
def walking(directory: Path) -> Iterator[Walk]:
    """Everything up, before the first plan."""
    ledger = Ledger(engine_spec(), GRACE_SECONDS, make_safe_default(1))
    # What still passes in a session that is over is not used.
    sessions: set[str] = set()
    finished_engines: set[str] = set()

    def witness(kind: str, session: str, message: Any) -> None:
        if kind == "plan":
            if session not in sessions:
                finished_engines.update(sessions)
                sessions.add(session)
            overrides = set(message.overrides)
            ledger.sent(session, message, time.monotonic(), set(), overrides, None)
        elif kind == "before" and message is None:
            # Its sidecar is gone; what that acknowledged, only the agent knows.
            ledger.died(session)
        elif kind in {"before", "received"}:
            finished_engines.add(session)
            ledger.passed_in_vain(session, message)
        elif session not in finished_engines:
            ledger.read(session, message.dropped_reports)
            for sent in message.reports:
                report = report_from_proto(sent)
                if sent.plan_session != session_tag(session):  # the sidecar ignores that plan
                    report = replace(report, plan_epoch=0, probe_id=0)
                ledger.folded_by(session, report)

    address = f"unix:{directory}/relay.sock"
    with Relay(address, f"unix:{directory}/controller.sock", witness) as relay:
        # Not nice: leases are short, and others may be busy.
        settings = LinkSettings(sidecar=address, grace_seconds=GRACE_SECONDS, agent_nice=0)
        link = EngineLink.start(engine_spec(), settings, startup_gamma=1)
        walk = Walk(directory, link, ledger, relay)
        try:
            walk.start_sidecar()
            yield walk
        finally:
            walk.end()
            link.close()


@pytest.mark.slow
@pytest.mark.timeout(600 + 10 * EVENTS)
def test_whatever_befalls_the_processes_the_engine_runs_what_was_issued(tmp_path: Path):
    with walking(tmp_path) as walk:
        walk.calm()
        for number in range(EVENTS):
            walk.befall()
            walk.step(random.Random(number).choice([1, 10, 50]))
        walk.calm()
        print(f"seed {SEED}: {len(walk.events)} events, {walk._step} steps")
