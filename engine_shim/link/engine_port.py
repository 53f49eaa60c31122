"""The agent's end of the socket pair, on asyncio."""

import asyncio
import socket
from typing import Final

from engine_shim.link import packets
from engine_shim.link.errors import PacketError
from engine_shim.link.packets import SidecarState
from engine_shim.link.quiet_log import QuietLog
from engine_shim.link.report_buffer import ReportBuffer

_MOST_BYTES: Final = packets.MAX_HELLO_BYTES + 64
# A socket can be refilled as fast as it is read: the loop gets its turn after so many packets.
_MOST_PACKETS_AT_ONCE: Final = 512


class EnginePort:
    """Reports come in to `buffer` (and set `arrived`); the newest plan and state go out.

    `gone` is set when the engine closed its end.  What the engine has not room for waits here, and
    only the newest of it: an engine that runs no steps reads nothing.

    With `rest_seconds` above 0 not every report wakes this process: after it has read, it does not
    look again before so long.
    """

    def __init__(
        self, peer: socket.socket, buffer: ReportBuffer, log: QuietLog, rest_seconds: float
    ) -> None:
        peer.settimeout(0)
        self._peer = peer
        self._buffer = buffer
        self._log = log
        self._rest_seconds = rest_seconds
        self._loop = asyncio.get_running_loop()
        self._introduction: asyncio.Future[bytes] = self._loop.create_future()
        self._unsent_plan: bytes | None = None
        self._unsent_event: bytes | None = None
        self._state = SidecarState.UNKNOWN
        self.arrived = asyncio.Event()
        self.gone = asyncio.Event()
        self._loop.add_reader(peer, self._read)

    async def introduction(self) -> bytes:
        """The engine's serialized EngineSpec.  Raises PacketError when something else came."""
        return await self._introduction

    def send_plan(self, plan: packets.PlanPacket) -> None:
        """Sends a plan, or keeps it as the next to send."""
        self._unsent_plan = packets.encode_plan(plan)
        self._flush()

    def send_state(self, state: SidecarState, code: int, text: str) -> None:
        """Tells the engine how the sidecar is doing, once for each change."""
        if state is not self._state:
            self._state = state
            self._unsent_event = packets.encode_event(state, code, text)
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
        try:
            for _ in range(_MOST_PACKETS_AT_ONCE):
                data = self._peer.recv(_MOST_BYTES)
                if not data:
                    self.close()
                    return
                self._sort(data)
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._rest_seconds:
            self._loop.remove_reader(self._peer)
            self._loop.call_later(self._rest_seconds, self._look_again)

    def _look_again(self) -> None:
        if not self.gone.is_set():
            self._loop.add_reader(self._peer, self._read)

    def _sort(self, data: bytes) -> None:
        if not self._introduction.done():
            try:
                self._introduction.set_result(packets.decode_hello(data))
            except PacketError as error:
                self._introduction.set_exception(error)
            return
        try:
            report = packets.decode_report(data)
        except PacketError as error:
            self._buffer.lose()
            self._log.warning("unreadable-report", error=str(error))
            return
        self._buffer.add(report)
        self.arrived.set()
