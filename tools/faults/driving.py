"""Runs the engine's side of a fault: which choices the engine ran, and its sidecar's overrides."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import grpc

from controller.cli.connection import to_operators_address
from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.link.settings import LinkSettings
from lab.harness.background_thread import BackgroundThread
from speculation.v1 import policy_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc
from tests.support.eventually import eventually
from tests.support.linked_engine import LinkedEngine, linked_engine
from tests.support.sidecar_process import SidecarProcess, sidecar_process

# Long enough for an overloaded machine.
PATIENCE_SECONDS = 60.0
_PACE_SECONDS = 0.05
PIN = "pinned"
PINNED_GAMMA = 5
# The safe default of a linked engine.
SAFE_GAMMA = 1
# A lease and a grace short enough that a fault can wait for their end.
SHORT = {"CONTROLLER_PLANNER__LEASE_SECONDS": "2"}
SHORT_GRACE_SECONDS = 1.0

# The sources of an engine's choices after its sidecar fails, in order.
LAPSE_SOURCES = [Source.PLAN, Source.GRACE, Source.SAFE_DEFAULT]


@dataclass(frozen=True, slots=True)
class ExecutedChoice:
    """The choice that the engine ran from the moment `seconds` on (monotonic seconds)."""

    seconds: float
    source: Source
    gamma: int
    session: int


class Drive(BackgroundThread):
    """Runs an engine's steps on a thread while the context is open; `executed` has every change."""

    def __init__(self, engine: LinkedEngine) -> None:
        super().__init__("engine", PATIENCE_SECONDS)
        self.engine = engine
        self.executed: list[ExecutedChoice] = []
        self.longest_step_seconds = 0.0

    def __enter__(self) -> Self:
        super().__enter__()
        eventually(lambda: self.executed, description="a step")
        return self

    @property
    def current(self) -> ExecutedChoice:
        """The choice that ran last."""
        return self.executed[-1]

    def choices_since(self, moment: float) -> list[ExecutedChoice]:
        """The choice that ran at the moment, and those after it."""
        choices_before = [choice for choice in self.executed if choice.seconds <= moment]
        return [
            *choices_before[-1:],
            *(choice for choice in self.executed if choice.seconds > moment),
        ]

    def sources_since(self, moment: float) -> list[Source]:
        """The sources of the choices since the moment, each once, in order of appearance."""
        return list(dict.fromkeys(choice.source for choice in self.choices_since(moment)))

    def wait_for(self, source: Source, moment: float, excluded_session: int | None = None) -> float:
        """Seconds from the moment `moment` until a choice came from the source."""

        def list_matching() -> list[ExecutedChoice]:
            return [
                choice
                for choice in self.choices_since(moment)[1:]
                if choice.source is source and choice.session != excluded_session
            ]

        description = f"steps by {source.value}"
        return eventually(list_matching, description=description)[0].seconds - moment

    def wait_for_steps(self, count: int = 20) -> None:
        """Waits until `count` more steps have run."""
        target_step = self.engine.step + count
        eventually(lambda: self.engine.step >= target_step, description="steps")

    def _run(self) -> None:
        engine = self.engine
        while not self._stop.is_set():
            step_start = time.monotonic()
            engine.run(1)
            step_end = time.monotonic()
            self.longest_step_seconds = max(self.longest_step_seconds, step_end - step_start)
            choice = engine.choice
            assert choice is not None
            if not self.executed or _differs(self.executed[-1], choice):
                self.executed.append(
                    ExecutedChoice(step_end, choice.source, choice.gamma, choice.session)
                )


def _differs(executed: ExecutedChoice, choice: StepChoice) -> bool:
    return (executed.source, executed.gamma, executed.session) != (
        choice.source,
        choice.gamma,
        choice.session,
    )


def set_request(
    override_id: str, gamma: int, scope: policy_pb2.Scope, **duration: Any
) -> policy_pb2.SetOverrideRequest:
    """A request that pins `gamma`.  duration: for how long, `ttl_seconds` or `for_ever`."""
    return policy_pb2.SetOverrideRequest(
        override=policy_pb2.Override(
            override_id=override_id,
            scope=scope,
            rule=policy_pb2.OverrideRule(gamma=gamma),
            author="ann",
            reason="a test of faults or of load",
        ),
        **duration,
    )


def clear_request(override_id: str, **options: Any) -> policy_pb2.ClearOverrideRequest:
    """A request to clear an override as its author.  options: other fields."""
    return policy_pb2.ClearOverrideRequest(
        override_id=override_id, author="ann", reason="the test is over", **options
    )


class Operator:
    """An operator at a sidecar's own socket."""

    def __init__(self, address: str) -> None:
        self._address = to_operators_address(address)

    @contextmanager
    def _policy(self) -> Iterator[policy_pb2_grpc.PolicyServiceStub]:
        with grpc.insecure_channel(self._address) as channel:
            yield policy_pb2_grpc.PolicyServiceStub(channel)

    def pin(self, override_id: str = PIN, gamma: int = PINNED_GAMMA, seconds: float = 600) -> None:
        """Pins a draft length; the override is acknowledged on return.  Raises grpc.RpcError."""
        request = set_request(override_id, gamma, policy_pb2.Scope(fleet=True), ttl_seconds=seconds)
        with self._policy() as policy:
            policy.SetOverride(request, timeout=PATIENCE_SECONDS)

    def refusal(self, override_id: str) -> str:
        """Status code and message with which an override is refused; "" if it is not."""
        try:
            self.pin(override_id)
        except grpc.RpcError as error:
            call = cast("grpc.Call", error)
            return f"{call.code().name}: {call.details()}"
        return ""

    def clear(self, override_id: str) -> None:
        """Clears an override.  Raises grpc.RpcError."""
        with self._policy() as policy:
            policy.ClearOverride(clear_request(override_id), timeout=PATIENCE_SECONDS)

    def active_override_ids(self) -> set[str]:
        """Names of the overrides in force."""
        return {held_override.override.override_id for held_override in self.list_overrides()}

    def list_overrides(self) -> list[policy_pb2.HeldOverride]:
        """The overrides in force."""
        # Polling stays well below the hundred calls a second that a sidecar answers.
        time.sleep(_PACE_SECONDS)
        with self._policy() as policy:
            request = policy_pb2.ListOverridesRequest()
            return list(policy.ListOverrides(request, timeout=PATIENCE_SECONDS).overrides)


def list_engines(address: str) -> service_pb2.ListEnginesResponse:
    """Returns what a sidecar reports about its engines and itself."""
    with grpc.insecure_channel(address) as channel:
        return service_pb2_grpc.InspectionServiceStub(channel).ListEngines(
            service_pb2.ListEnginesRequest(), timeout=PATIENCE_SECONDS
        )


class Sidecars:
    """Sidecars that run one after the other, with the same state and address."""

    def __init__(self, place: Path, *flags: str, environment: dict[str, str]) -> None:
        self._place, self._flags, self._environment = place, flags, environment
        self._life = ExitStack()
        self.log = place / "sidecar.log"
        self.current = self._start()
        self.operator = Operator(self.current.address)

    @property
    def pid(self) -> int:
        """Process id of the running sidecar."""
        return self.current.process.pid

    def kill(self) -> None:
        """Kills the sidecar (SIGKILL)."""
        self._life.close()

    def restart(self) -> float:
        """Kills the sidecar if it runs, starts the next; returns when (monotonic seconds)."""
        self.kill()
        start_time = time.monotonic()
        self.current = self._start()
        return start_time

    def close(self) -> None:
        """Ends the sidecar."""
        self._life.close()

    def _start(self) -> SidecarProcess:
        return self._life.enter_context(
            sidecar_process(self._place, *self._flags, environment=self._environment, log=self.log)
        )


class LinkTestbed:
    """An engine under an operator's pin, and its sidecar."""

    def __init__(self, sidecars: Sidecars, drive: Drive) -> None:
        self.sidecars, self.drive = sidecars, drive
        self.operator = sidecars.operator


@contextmanager
def open_testbed(
    place: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    grace_seconds: float = LinkSettings().grace_seconds,
    address: str = "",
) -> Iterator[LinkTestbed]:
    """An engine that runs under an acknowledged pin.  address: where it finds its sidecar."""
    with contextlib.closing(Sidecars(place, *flags, environment=environment or {})) as sidecars:
        sidecars.operator.pin()
        with (
            linked_engine(
                # At its usual niceness a busy machine would starve the agent and hide the fault.
                address or sidecars.current.address,
                grace_seconds=grace_seconds,
                agent_nice=0,
            ) as engine,
            Drive(engine) as drive,
        ):
            yield LinkTestbed(sidecars, drive)
