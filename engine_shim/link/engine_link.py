"""The engine's end of the link: one packet out, at most a few in, for every decode step.

The functions that an engine step calls do not block and do not raise: no lock, no RPC, no wait.  If
the socket is full, the report is dropped and counted.  A dead agent is detected and reported, and
its successor is used as soon as it runs.

A process that the engine forks has a copy of the link and of its socket.  Packets that it sent
would count as the engine's, and packets that it read would be lost to the engine.  So it closes its
copy before anything else.
"""

import errno
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final, Self
from weakref import WeakSet

from google.protobuf.message import EncodeError

from engine_shim.link.errors import LinkStartError, PacketError, UnusablePlanError
from engine_shim.link.messages import (
    MAX_GAMMA,
    MAX_PACKET_BYTES,
    MAX_REPORT_BYTES,
    REPORT,
    REQUEST,
    ArrivedPlan,
    SidecarState,
    read_packet,
    slow_protobuf_reason,
)
from engine_shim.link.plan_follower import PlanFollower, Source, StepChoice, make_safe_default
from engine_shim.link.secret import new_secret
from engine_shim.link.settings import LinkSettings
from engine_shim.link.supervisor import AgentSupervisor, agent_command
from speculation.v1.engine_pb2 import EngineSpec, LostCapability, StepReport
from speculation.v1.service_pb2 import IntroduceRequest, SteerRequest

_SEND_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
# More than the kernel's buffer holds; it bounds the loop if an agent sends without pause.
_MAX_PACKETS_PER_READ: Final = 1024
_DISCONNECT_ERRNOS: Final = frozenset(
    {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF, errno.ESHUTDOWN}
)
# Errors of protobuf for numbers that do not fit a field, and of messages that are too large.
_ENCODING_ERRORS: Final = (TypeError, ValueError, OverflowError, EncodeError, PacketError)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """Describes the state of the link; counts are since the start of the engine.

    `source`: where the last choice came from.  `lease_seconds_left`: negative after the lease ran
    out, -inf before the first plan.  `reports_dropped`: the socket was full or closed.
    `reports_invalid`: reports that could not be encoded.  `packets_refused`: malformed packets, and
    plans that were stale or asked for an arm that this engine does not have.
    """

    agent_connected: bool
    agent_pid: int | None
    agent_starts: int
    sidecar: SidecarState
    sidecar_detail: str
    source: Source
    epoch: int
    lease_seconds_left: float
    lapses: int
    reports_sent: int
    reports_dropped: int
    reports_invalid: int
    plans_taken: int
    packets_refused: int


class EngineLink:
    """Connects an engine to its agent: `choose` before each decode step, `report` after it.

    Both must be called from the same thread.  plan_follower: makes the choices; kept here for the
    status.
    """

    def __init__(self, supervisor: AgentSupervisor, plan_follower: PlanFollower) -> None:
        self._supervisor = supervisor
        self.plan_follower = plan_follower
        self._socket: socket.socket | None = None
        self._poller = select.poll()
        self._closed = False
        # One byte more than the limit, to detect packets that are too long.
        self._buffer = bytearray(MAX_PACKET_BYTES + 1)
        self._view = memoryview(self._buffer)
        self._unreported_drops = 0
        self._sent_reports = self._dropped_reports = self._invalid_reports = (
            self._refused_packets
        ) = 0
        self._sidecar = SidecarState.UNKNOWN
        self._sidecar_detail = ""
        # Packets of all lost capabilities, and those not yet sent to the current agent.
        self._lost_packets: list[bytes] = []
        self._unsent_lost_packets: deque[bytes] = deque()
        _links.add(self)

    @classmethod
    def start(
        cls,
        engine_spec: EngineSpec,
        settings: LinkSettings,
        startup_gamma: int | None = None,
        secret: str = "",
    ) -> Self:
        """Starts the agent and its supervision; returns at once, before any plan.

        The safe default is the first drafter at `settings.safe_gamma`, or at `startup_gamma` (the
        engine's own) if that is unset; the introduction contains it.  secret: identifies this
        engine to the sidecar after a restart; "" for a new one.  Raises LinkStartError if the
        introduction or the settings are invalid, or if no agent can be started.
        """
        if slow_reason := slow_protobuf_reason():
            raise LinkStartError(slow_reason)
        if not settings.sidecar:
            raise LinkStartError("SPECULATION_SIDECAR is not set: there is no sidecar to talk to")
        plan_follower = make_plan_follower(engine_spec, settings, startup_gamma)
        introduced_spec = EngineSpec(safe_gamma=plan_follower.safe_default.gamma)
        introduced_spec.MergeFrom(engine_spec)
        # All agents of this engine send the same secret, so each continues under the same id.
        introduction = IntroduceRequest(
            engine=introduced_spec, engine_secret=secret or new_secret()
        )
        first_packet = introduction.SerializeToString()
        if len(first_packet) > MAX_PACKET_BYTES:
            raise LinkStartError(
                f"the introduction cannot be sent: it has {len(first_packet)} bytes, limit "
                f"{MAX_PACKET_BYTES}"
            )
        command = agent_command(settings)
        supervisor = AgentSupervisor(command, first_packet)
        supervisor.start()
        link = cls(supervisor, plan_follower)
        link._connect_if_possible()
        return link

    def report(self, fill: Callable[[StepReport], None]) -> bool:
        """Sends one step report; `fill` is called with an empty message and writes the fields.

        Returns False if the report was dropped (and counted).
        """
        # A message that is reused would grow: protobuf frees its memory only with the message.
        report = StepReport()
        try:
            fill(report)
            packet = REPORT + report.SerializeToString()
            if len(packet) > MAX_REPORT_BYTES:
                raise PacketError(f"{len(packet)} bytes, limit {MAX_REPORT_BYTES}")
        except _ENCODING_ERRORS as error:
            self._invalid_reports += 1
            if self._invalid_reports == 1:
                _log.error("step %r cannot be reported: %s", report.step, error)
            return False
        agent_socket = self._socket or self._connect_if_possible()
        if self._unsent_lost_packets:
            agent_socket = self._send_lost_capabilities(agent_socket)
        if agent_socket is not None:
            try:
                if self._unreported_drops:
                    dropped = SteerRequest(dropped_reports=self._unreported_drops)
                    agent_socket.send(REQUEST + dropped.SerializeToString(), _SEND_FLAGS)
                    self._unreported_drops = 0
                agent_socket.send(packet, _SEND_FLAGS)
            except BlockingIOError:
                pass
            except OSError as error:
                self._handle_socket_error(error)
            else:
                self._sent_reports += 1
                return True
        self._dropped_reports += 1
        self._unreported_drops += 1
        return False

    def report_lost_capability(self, lost_capability: LostCapability) -> None:
        """Reports a lost capability to the sidecar, again until it has arrived.

        Must be called from the thread that reports.  A plan that was made earlier may still ask for
        this capability.
        """
        packet = REQUEST + SteerRequest(lost=[lost_capability]).SerializeToString()
        self._lost_packets.append(packet)
        self._unsent_lost_packets.append(packet)
        self._send_lost_capabilities(self._connect_if_possible())

    def choose(self, batch_size: int) -> StepChoice:
        """Chooses what the next decode step over `batch_size` sequences runs; once for each step.

        For an engine of one process.  An engine of several processes uses `receive` and
        `plan_follower` separately, so that all processes adopt a plan before the same step.
        """
        self.poll()
        return self.plan_follower.choose(batch_size, monotonic())

    def poll(self) -> None:
        """Reads the packets of the agent and adopts the newest plan.

        `choose` calls it; an engine may also call it between steps (for example at a prefill after
        a long pause), so that the next step has a fresh lease.
        """
        plan = self.receive()
        if plan is not None:
            self.plan_follower.accept(plan, monotonic())

    def receive(self) -> ArrivedPlan | None:
        """Reads the agent's packets; returns the newest plan that `plan_follower` can accept."""
        agent_socket = self._socket or self._connect_if_possible()
        if self._unsent_lost_packets:
            agent_socket = self._send_lost_capabilities(agent_socket)
        # Polled first each time: a receive without a packet raises, which costs several times more.
        if agent_socket is None or not self._poller.poll(0):
            return None
        plans: list[ArrivedPlan] = []
        try:
            for packets_read in range(_MAX_PACKETS_PER_READ):
                if packets_read and not self._poller.poll(0):
                    break
                length = agent_socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
                if length == 0:
                    self._disconnect("the agent closed its end")
                    break
                self._handle_packet(length, plans)
        except BlockingIOError:
            pass
        except OSError as error:
            self._handle_socket_error(error)
        repeated = None
        while plans:  # prefer the newest usable plan that is not in use already
            arrived = plans.pop()
            try:
                self.plan_follower.check(arrived)
            except UnusablePlanError as error:
                self._count_refused(error)
                continue
            if not self.plan_follower.is_current_plan(arrived.plan):
                return arrived
            repeated = repeated or arrived
        return repeated

    def status(self) -> LinkStatus:
        """Returns a snapshot; may be called from any thread."""
        plan = self.plan_follower.plan
        return LinkStatus(
            agent_connected=self._socket is not None,
            agent_pid=self._supervisor.agent_pid,
            agent_starts=self._supervisor.starts,
            sidecar=self._sidecar,
            sidecar_detail=self._sidecar_detail,
            source=self.plan_follower.source,
            epoch=0 if plan is None else plan.epoch,
            lease_seconds_left=self.plan_follower.lease_end - monotonic(),
            lapses=self.plan_follower.lapses,
            reports_sent=self._sent_reports,
            reports_dropped=self._dropped_reports,
            reports_invalid=self._invalid_reports,
            plans_taken=self.plan_follower.plans_accepted,
            packets_refused=self._refused_packets,
        )

    def close(self) -> None:
        """Ends the agent.  Later calls still work: reports are dropped, and the lease runs out."""
        if not self._closed:
            self._closed = True
            self._disconnect("the link was closed")
            self._supervisor.stop()

    def abandon_after_fork(self) -> None:
        """Closes this copy in a forked child; the engine's own link is not affected."""
        self._closed = True
        self._disconnect("the link belongs to the process that forked this one")
        self._supervisor.abandon_after_fork()
        self.plan_follower.drop_plan()

    def _connect_if_possible(self) -> socket.socket | None:
        """Returns the socket in use, or else that of a new agent if one has been started."""
        if self._socket is None and not self._closed:
            self._socket = self._supervisor.take_socket()
            if self._socket is not None:
                self._poller.register(self._socket, select.POLLIN)
                self._unsent_lost_packets = deque(self._lost_packets)
        return self._socket

    def _send_lost_capabilities(self, agent_socket: socket.socket | None) -> socket.socket | None:
        """Sends lost capabilities that the agent has not got; returns the socket still in use."""
        if agent_socket is None:
            return None
        try:
            while self._unsent_lost_packets:
                agent_socket.send(self._unsent_lost_packets[0], _SEND_FLAGS)
                self._unsent_lost_packets.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._handle_socket_error(error)
        return self._socket

    def _handle_packet(self, length: int, plans: list[ArrivedPlan]) -> None:
        """Handles the packet in the buffer, or adds it to `plans`."""
        try:
            message = read_packet(self._view[:length])
            if isinstance(message, ArrivedPlan):
                plans.append(message)
                return
            self._sidecar = SidecarState(message.state)
        except (PacketError, ValueError) as error:
            self._count_refused(error)
        else:
            self._sidecar_detail = message.text

    def _count_refused(self, error: Exception) -> None:
        self._refused_packets += 1
        if self._refused_packets == 1:
            _log.error("the agent sent an unusable packet (later ones are counted): %s", error)

    def _handle_socket_error(self, error: OSError) -> None:
        if error.errno in _DISCONNECT_ERRNOS:
            self._disconnect(str(error))

    def _disconnect(self, reason: str) -> None:
        old_socket, self._socket = self._socket, None
        if old_socket is not None:
            self._poller = select.poll()
            old_socket.close()
        self._sidecar, self._sidecar_detail = SidecarState.UNKNOWN, f"no agent: {reason}"


# The links of this process.
_links: WeakSet[EngineLink] = WeakSet()


def _abandon_links_after_fork() -> None:
    for link in tuple(_links):
        link.abandon_after_fork()


os.register_at_fork(after_in_child=_abandon_links_after_fork)


def make_plan_follower(
    engine_spec: EngineSpec, settings: LinkSettings, startup_gamma: int | None
) -> PlanFollower:
    """Makes the plan follower of an engine with this introduction.

    The arguments and errors are those of `EngineLink.start`.
    """
    _check_drafters(engine_spec)
    gamma = startup_gamma if settings.safe_gamma is None else settings.safe_gamma
    if gamma is None:
        raise LinkStartError("no safe draft length: set SPECULATION_SAFE_GAMMA")
    if gamma not in engine_spec.drafters[0].gammas:
        raise LinkStartError(
            f"the safe draft length {gamma} is not among those of drafter "
            f"{engine_spec.drafters[0].name!r}: {list(engine_spec.drafters[0].gammas)}"
        )
    return PlanFollower(engine_spec.drafters, make_safe_default(gamma), settings.grace_seconds)


def _check_drafters(engine_spec: EngineSpec) -> None:
    """Raises LinkStartError if there is no drafter, or if one has invalid draft lengths."""
    if not engine_spec.drafters:
        raise LinkStartError("0 drafters are introduced: at least 1 is needed")
    for drafter in engine_spec.drafters:
        if not drafter.gammas or max(drafter.gammas) > MAX_GAMMA:
            raise LinkStartError(
                f"drafter {drafter.name!r}: draft lengths {list(drafter.gammas)} must be a "
                f"non-empty list in [0, {MAX_GAMMA}]"
            )
