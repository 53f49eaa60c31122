"""A real proxy between agents and their sidecar: bytes late, connections reset."""

import asyncio
import contextlib
import socket
import struct
import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

_CHUNK = 65_536
# SO_LINGER on, for no time: closing resets.
_RESET = struct.pack("ii", 1, 0)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Proxy:
    """Listens at one address and passes everything on to the other, both as gRPC has them.

    delay_seconds: by which every byte towards the agent is late.
    """

    def __init__(self, listen: str, target: str) -> None:
        self.address = listen
        self.delay_seconds = 0.0
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._serve())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def reset(self) -> int:
        """Resets every connection at both ends; how many there were."""
        count: int = self._run(self._reset())
        return count // 2

    async def _serve(self) -> None:
        if self.address.startswith("unix:"):
            path = self.address.removeprefix("unix:")
            self._server = await asyncio.start_unix_server(self._handle_connection, path)
        else:
            host, _, port = self.address.rpartition(":")
            self._server = await asyncio.start_server(self._handle_connection, host, int(port))

    async def _end(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _reset(self) -> int:
        writers = list(self._writers)
        for writer in writers:
            end = writer.get_extra_info("socket")
            if end.family != socket.AF_UNIX:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        return len(writers)

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            target_reader, target_writer = await self._connect()
        except OSError:
            writer.close()
            return
        pair = {writer, target_writer}
        self._writers |= pair
        tasks = {
            self._loop.create_task(self._forward(reader, target_writer, delayed=False)),
            self._loop.create_task(self._forward(target_reader, writer, delayed=True)),
        }
        self._tasks |= tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks -= tasks
            self._writers -= pair
            for peer in pair:
                peer.close()

    async def _connect(self) -> Streams:
        if self._target.startswith("unix:"):
            return await asyncio.open_unix_connection(self._target.removeprefix("unix:"))
        host, _, port = self._target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, delayed: bool
    ) -> None:
        """In order, each chunk when it is due."""
        pending: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await pending.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        async def collect() -> None:
            data = b"-"
            with contextlib.suppress(ConnectionError):
                while data:
                    data = await reader.read(_CHUNK)
                    delay = self.delay_seconds if delayed else 0.0
                    await pending.put((self._loop.time() + delay, data))

        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(collect())
            with contextlib.suppress(ConnectionError):
                await deliver()
            collecting.cancel()

    def _run(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(30)
