"""The agent's end of the socket pair, on asyncio."""

import asyncio
import socket
from typing import Final

from engine_shim.link.errors import PacketError
from engine_shim.link.losses import KnownLosses
from engine_shim.link.messages import (
    MAX_PACKET_BYTES,
    MAX_REPORT_BYTES,
    REPORT,
    ArrivedPlan,
    SidecarState,
    plan_packet,
    read_introduction,
    read_request,
    state_packet,
)
from engine_shim.link.rate_limited_log import RateLimitedLog
from engine_shim.link.report_buffer import ReportBuffer
from speculation.v1.service_pb2 import IntroduceRequest

# A socket can be refilled as fast as it is read: the event loop runs after this many packets.
_MOST_PACKETS_AT_ONCE: Final = 512
# After this many polls without a packet, the next packet wakes this process.
_VAIN_LOOKS: Final = 8


class AgentSocket:
    """Reads reports into `buffer` and lost capabilities into `losses`; sends the plan and state.

    `arrived` is set when a report or a lost capability was read.

    `gone` is set when the engine closed its end.  If the engine's socket buffer is full, the newest
    plan and the newest state wait here: an engine that runs no steps reads nothing.

    When a report wakes this process, the engine's thread pays for the wake-up, which can cost more
    than the rest of its send.  With `rest_seconds` above 0, this process polls the socket every
    `rest_seconds` after a report, and stops polling after a few polls without a packet.  So no
    report wakes it while steps follow each other.
    """

    def __init__(
        self, peer: socket.socket, buffer: ReportBuffer, log: RateLimitedLog, rest_seconds: float
    ) -> None:
        peer.settimeout(0)
        self._peer = peer
        self._buffer = buffer
        self._log = log
        self._rest_seconds = rest_seconds
        # Polls in a row without a packet; None while a packet wakes this process.
        self._vain_looks: int | None = None
        self._loop = asyncio.get_running_loop()
        self._introduction: asyncio.Future[IntroduceRequest] = self._loop.create_future()
        self._unsent_plan: bytes | None = None
        self._unsent_event: bytes | None = None
        self._state = SidecarState.UNKNOWN
        self.losses = KnownLosses()
        self.arrived = asyncio.Event()
        self.gone = asyncio.Event()
        self._loop.add_reader(peer, self._read)

    async def introduction(self) -> IntroduceRequest:
        """Returns the engine's first packet.  Raises PacketError if it is not an introduction."""
        return await self._introduction

    def send_plan(self, arrived: ArrivedPlan) -> None:
        """Sends a plan, or keeps it as the next to send.  Raises PacketError if it is too large."""
        self._unsent_plan = plan_packet(arrived)
        self._flush()

    def send_state(self, state: SidecarState, code: int, text: str) -> None:
        """Sends the engine the state of the sidecar, once for each change."""
        if state is not self._state:
            self._state = state
            self._unsent_event = state_packet(state, code, text)
            self._flush()

    def close(self) -> None:
        """Closes the socket."""
        if self._peer.fileno() >= 0:
            self._loop.remove_reader(self._peer)
            self._loop.remove_writer(self._peer)
            self._peer.close()
        self.gone.set()

    def _flush(self) -> None:
        if self.gone.is_set():
            return
        try:
            if self._unsent_event is not None:
                self._peer.send(self._unsent_event, socket.MSG_NOSIGNAL)
                self._unsent_event = None
            if self._unsent_plan is not None:
                self._peer.send(self._unsent_plan, socket.MSG_NOSIGNAL)
                self._unsent_plan = None
        except BlockingIOError:
            self._loop.add_writer(self._peer, self._flush)
        except OSError:
            self.close()
        else:
            self._loop.remove_writer(self._peer)

    def _read(self) -> None:
        packets_read = self._drain()
        if self.gone.is_set() or not self._rest_seconds:
            return
        if self._vain_looks is None:
            self._loop.remove_reader(self._peer)
            self._vain_looks = 0
        self._vain_looks = 0 if packets_read else self._vain_looks + 1
        if self._vain_looks < _VAIN_LOOKS:
            self._loop.call_later(self._rest_seconds, self._read)
        else:
            self._vain_looks = None
            self._loop.add_reader(self._peer, self._read)

    def _drain(self) -> int:
        """Reads the waiting packets; returns their number."""
        for number in range(_MOST_PACKETS_AT_ONCE):
            try:
                # One byte more than the limit, to detect packets that are too long.
                data = self._peer.recv(MAX_PACKET_BYTES + 1)
            except BlockingIOError:
                return number
            except OSError:
                data = b""
            if not data:
                self.close()
                return number
            self._sort(data)
        return _MOST_PACKETS_AT_ONCE

    def _sort(self, data: bytes) -> None:
        if not self._introduction.done():
            self._take_introduction(data)
            return
        if data[:1] == REPORT and len(data) <= MAX_REPORT_BYTES:
            self._buffer.add(data[1:])
            self.arrived.set()
            return
        try:
            said = read_request(data)
        except PacketError as error:
            self._buffer.lose()
            self._log.warning("unreadable-packet", error=str(error))
            return
        self._buffer.lose(said.dropped_reports)
        try:
            for loss in said.lost:
                self.losses.take(loss)
        except PacketError as error:
            self._log.warning("unusable-loss", error=str(error))
        self.arrived.set()

    def _take_introduction(self, data: bytes) -> None:
        try:
            self._introduction.set_result(read_introduction(data))
        except PacketError as error:
            self._introduction.set_exception(error)
