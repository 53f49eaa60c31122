"""The agent's end of the socket pair, on asyncio."""

import asyncio
import socket
from typing import Final

from engine_shim.link.errors import PacketError
from engine_shim.link.lost_capabilities import LostCapabilities
from engine_shim.link.messages import (
    MAX_PACKET_BYTES,
    MAX_REPORT_BYTES,
    REPORT,
    ArrivedPlan,
    SidecarState,
    encode_plan,
    encode_state,
    read_introduction,
    read_request,
)
from engine_shim.link.rate_limited_log import RateLimitedLog
from engine_shim.link.report_buffer import ReportBuffer
from speculation.v1.service_pb2 import IntroduceRequest

# A socket can be refilled as fast as it is read: the event loop runs after this many packets.
_MAX_PACKETS_PER_READ: Final = 512
# After this many polls without a packet, the next packet wakes this process.
_MAX_EMPTY_POLLS: Final = 8


class AgentSocket:
    """Reads reports and lost capabilities from the engine; sends the plan and the state.

    `data_arrived` is set when a report or a lost capability was read.

    `engine_gone` is set when the engine closed its end.  If the engine's socket buffer is full, the
    newest plan and the newest state wait here: an engine that runs no steps reads nothing.

    When a report wakes this process, the engine's thread pays for the wake-up, which can cost more
    than the rest of its send.  With `poll_interval_seconds` above 0, this process polls the socket
    every `poll_interval_seconds` after a report, and stops polling after a few polls without a
    packet.  So no report wakes it while steps follow each other.
    """

    def __init__(
        self,
        peer: socket.socket,
        buffer: ReportBuffer,
        log: RateLimitedLog,
        poll_interval_seconds: float,
    ) -> None:
        peer.settimeout(0)
        self._peer = peer
        self._buffer = buffer
        self._log = log
        self._poll_interval_seconds = poll_interval_seconds
        # Polls in a row without a packet; None while a packet wakes this process.
        self._empty_polls: int | None = None
        self._loop = asyncio.get_running_loop()
        self._introduction: asyncio.Future[IntroduceRequest] = self._loop.create_future()
        self._unsent_plan: bytes | None = None
        self._unsent_event: bytes | None = None
        self._state = SidecarState.UNKNOWN
        self.lost_capabilities = LostCapabilities()
        self.data_arrived = asyncio.Event()
        self.engine_gone = asyncio.Event()
        self._loop.add_reader(peer, self._read)

    async def introduction(self) -> IntroduceRequest:
        """Returns the engine's first packet.  Raises PacketError if it is not an introduction."""
        return await self._introduction

    def send_plan(self, arrived: ArrivedPlan) -> None:
        """Sends a plan, or keeps it as the next to send.  Raises PacketError if it is too large."""
        self._unsent_plan = encode_plan(arrived)
        self._flush()

    def send_state(self, state: SidecarState, code: int, text: str) -> None:
        """Sends the engine the state of the sidecar, once for each change."""
        if state is not self._state:
            self._state = state
            self._unsent_event = encode_state(state, code, text)
            self._flush()

    def close(self) -> None:
        """Closes the socket."""
        if self._peer.fileno() >= 0:
            self._loop.remove_reader(self._peer)
            self._loop.remove_writer(self._peer)
            self._peer.close()
        self.engine_gone.set()

    def _flush(self) -> None:
        if self.engine_gone.is_set():
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
        if self.engine_gone.is_set() or not self._poll_interval_seconds:
            return
        if self._empty_polls is None:
            self._loop.remove_reader(self._peer)
            self._empty_polls = 0
        self._empty_polls = 0 if packets_read else self._empty_polls + 1
        if self._empty_polls < _MAX_EMPTY_POLLS:
            self._loop.call_later(self._poll_interval_seconds, self._read)
        else:
            self._empty_polls = None
            self._loop.add_reader(self._peer, self._read)

    def _drain(self) -> int:
        """Reads the waiting packets; returns their number."""
        for packets_read in range(_MAX_PACKETS_PER_READ):
            try:
                # One byte more than the limit, to detect packets that are too long.
                data = self._peer.recv(MAX_PACKET_BYTES + 1)
            except BlockingIOError:
                return packets_read
            except OSError:
                data = b""
            if not data:
                self.close()
                return packets_read
            self._dispatch(data)
        return _MAX_PACKETS_PER_READ

    def _dispatch(self, data: bytes) -> None:
        if not self._introduction.done():
            self._set_introduction(data)
            return
        if data[:1] == REPORT and len(data) <= MAX_REPORT_BYTES:
            self._buffer.add(data[1:])
            self.data_arrived.set()
            return
        try:
            request = read_request(data)
        except PacketError as error:
            self._buffer.count_lost()
            self._log.warning("unreadable-packet", error=str(error))
            return
        self._buffer.count_lost(request.dropped_reports)
        try:
            for lost_capability in request.lost:
                self.lost_capabilities.add(lost_capability)
        except PacketError as error:
            self._log.warning("unusable-loss", error=str(error))
        self.data_arrived.set()

    def _set_introduction(self, data: bytes) -> None:
        try:
            self._introduction.set_result(read_introduction(data))
        except PacketError as error:
            self._introduction.set_exception(error)
