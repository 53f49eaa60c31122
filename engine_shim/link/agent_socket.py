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

# A socket can be refilled as fast as it is read: the loop gets its turn after so many packets.
_MOST_PACKETS_AT_ONCE: Final = 512
# After so many looks that found nothing, the next packet wakes this process.
_VAIN_LOOKS: Final = 8


class AgentSocket:
    """Reports come in to `buffer` and losses to `losses`; the newest plan and state go out.

    Either sets `arrived`.

    `gone` is set when the engine closed its end.  What the engine has not room for waits here, and
    only the newest of it: an engine that runs no steps reads nothing.

    A report that wakes this process costs the engine's thread the waking, which can be more than
    all the rest of its send.  With `rest_seconds` above 0 none does while steps follow each other:
    after a report it looks every so often by itself, until it has found nothing for some looks.
    """

    def __init__(
        self, peer: socket.socket, buffer: ReportBuffer, log: RateLimitedLog, rest_seconds: float
    ) -> None:
        peer.settimeout(0)
        self._peer = peer
        self._buffer = buffer
        self._log = log
        self._rest_seconds = rest_seconds
        # Looks in a row that found nothing; None while a packet wakes this process.
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
        """The engine's first packet.  Raises PacketError when that is no introduction."""
        return await self._introduction

    def send_plan(self, arrived: ArrivedPlan) -> None:
        """Sends a plan, or keeps it as the next to send.  Raises PacketError for one too large."""
        self._unsent_plan = plan_packet(arrived)
        self._flush()

    def send_state(self, state: SidecarState, code: int, text: str) -> None:
        """Tells the engine how the sidecar is doing, once for each change."""
        if state is not self._state:
            self._state = state
            self._unsent_event = state_packet(state, code, text)
            self._flush()

    def close(self) -> None:
        """Lets go of the socket."""
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
        """Packets that were there."""
        for number in range(_MOST_PACKETS_AT_ONCE):
            try:
                # One byte more than a packet may have, which shows that one is longer.
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
