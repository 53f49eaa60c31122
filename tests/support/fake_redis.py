"""A server that speaks RESP, and answers with what the test sets: junk, or what a real Redis says.

FakeRedis(reply)            reply: (command, arguments) -> bytes of RESP, or None to close
FakeRedis(reply, real=p)    for None it asks the real Redis on port p, and passes its reply on
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self


def resp(value: int | bytes | Sequence[Any]) -> bytes:
    """A value in RESP."""
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    return b"*%d\r\n%b" % (len(value), b"".join(map(resp, value)))


Reply = Callable[[str, Sequence[bytes]], bytes | None]
# What any command may be answered with, whatever its reply should be.
JUNK: dict[str, bytes] = {
    "integer": b":7\r\n",
    "negative": b":-1\r\n",
    "error": b"-ERR \x1b[31mno such thing\r\n",
    "moved to nowhere": b"-MOVED 1 127.0.0.1:1\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "no script": b"-NOSCRIPT No matching script\r\n",
    "nil": b"$-1\r\n",
    "nil list": b"*-1\r\n",
    "status": b"+OK\r\n",
    "text": b"$3\r\n\xff\xfe\xfd\r\n",
    "empty text": b"$0\r\n\r\n",
    "empty list": b"*0\r\n",
    "numbers": b"*7\r\n" + 7 * b":1\r\n",
    "texts": b"*7\r\n" + 7 * b"$1\r\nx\r\n",
    # In the form of an answer to a write, and to a look at all entries.
    "written": resp([1, b'{"revision":1,"body":"junk","created":1,"ended":""}', -1]),
    "entries": resp([b"", b"1", 0, 0, 0, [], [[], b"x", 400 * b"9"]]),
    "errors in a list": b"*7\r\n" + 7 * b"-ERR x\r\n",
    "nested": 3000 * b"*1\r\n" + b":1\r\n",
    "endless list": b"*2000000000\r\n" + 2000 * b":1\r\n",
    "huge number": b":" + 400 * b"9" + b"\r\n",
    "huge text": b"$9999999999\r\n" + 5000 * b"x",
    "negative length": b"$-7\r\n",
    "no number": b":x\r\n",
    "not RESP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "truncated": b"$10\r\nabc",
    "long line": b"+" + 200_000 * b"x",
    "nothing": b"",
}


class FakeRedis:
    """See the module.  Listens inside its context, on this event loop."""

    def __init__(self, reply: Reply, real: int = 0) -> None:
        self._reply = reply
        self._real = real
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.commands: list[str] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.close()
        if self._serving:
            await asyncio.wait(self._serving)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        self._open.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                if self._real:
                    upstream_reader, upstream_writer = await asyncio.open_connection(
                        "127.0.0.1", self._real
                    )
                    self._open.add(upstream_writer)
                    with contextlib.closing(upstream_writer):
                        await self._answer(
                            reader,
                            writer,
                            lambda raw: _forward(raw, upstream_reader, upstream_writer),
                        )
                else:
                    await self._answer(reader, writer, None)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        forward: Callable[[bytes], Awaitable[bytes]] | None,
    ) -> None:
        while True:
            raw, words = await _command(reader)
            name = words[0].decode().upper()
            self.commands.append(name)
            reply = self._reply(name, words[1:])
            if reply is None and forward is not None:
                reply = await forward(raw)
            if reply is None:
                return
            writer.write(reply)
            await writer.drain()


async def _command(reader: asyncio.StreamReader) -> tuple[bytes, list[bytes]]:
    """A command as it came, and its words."""
    head = await reader.readuntil(b"\r\n")
    raw, words = [head], list[bytes]()
    for _ in range(int(head[1:])):
        size = await reader.readuntil(b"\r\n")
        word = await reader.readexactly(int(size[1:]) + 2)
        raw += [size, word]
        words.append(word[:-2])
    return b"".join(raw), words


async def _forward(
    raw: bytes, upstream_reader: asyncio.StreamReader, upstream_writer: asyncio.StreamWriter
) -> bytes:
    """What the real one answers."""
    upstream_writer.write(raw)
    await upstream_writer.drain()
    return await _reply_of(upstream_reader)


async def _reply_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n")
    kind, size = head[:1], head[1:-2]
    if kind == b"$" and size != b"-1":
        return head + await reader.readexactly(int(size) + 2)
    if kind == b"*" and size != b"-1":
        return head + b"".join([await _reply_of(reader) for _ in range(int(size))])
    return head


def handshake(name: str) -> bytes | None:
    """The reply to what a client sends before its first command; None for any other."""
    return b"+OK\r\n" if name in {"CLIENT", "SELECT", "AUTH"} else None
