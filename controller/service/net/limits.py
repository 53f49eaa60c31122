"""Limits what one client, or many, may use of a sidecar: connections, calls, time, bytes.

The guard limits the rate of calls (`guard`).  The types that messages are converted to limit their
content.
"""

import asyncio
import resource
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Generic, TypeVar, cast

import structlog

from controller.service.net.errors import TooManyCallsError
from controller.settings.settings import Settings

# A connection is closed if the client does not complete the handshake and acknowledge the server's
# HTTP/2 settings within the first time, or makes no call for the second.  Until the settings are
# acknowledged, gRPC accepts 16 MiB of headers.
HANDSHAKE_SECONDS: Final = 10
IDLE_SECONDS: Final = 300
# A peer that is silent for this long gets a ping.  Without an answer in time it is disconnected.
KEEPALIVE_SECONDS: Final = 60
KEEPALIVE_ANSWER_SECONDS: Final = 20
# Clients may send pings too, with or without a call, at least this long apart.  grpc-go's clients
# ping every 10 s at the soonest, proxies and load balancers less often; half of that allows for
# delays.  A connection with faster pings ends at the third one.
CLIENT_KEEPALIVE_SECONDS_MIN: Final = 5
# Concurrent calls of one connection: an agent has two, and clients queue calls beyond the limit.
STREAMS_A_CONNECTION: Final = 1024
# A message is parsed on the event loop: 128 KiB take 6 ms at worst (empty reports).  A profile is
# one text, whose message is cheap to parse; a thread then reads the text.
MESSAGE_BYTES: Final = 128 * 1024
PROFILE_BYTES: Final = 1024 * 1024
# Lists and explanations that may wait on one server; its guard admits no more at a time.
READS_WAITING: Final = 400
_PROFILE_CALLS: Final = frozenset({"InstallProfile", "PushProfile"})
# The longest slice of interruptible work on the event loop.
_PIECE_SECONDS: Final = 0.002
# After a slice the event loop stays free for this multiple of the slice's time.  Introductions,
# decisions and lists each have a queue of their own.  Decisions take at most half of the loop, so
# all of them together leave time to accept new calls at once.
_FREE_TIMES: Final = 3.0
# The longest such pause: work that waits for a thread or the store does not occupy the loop.
_FREE_SECONDS_MAX: Final = 0.25
# File descriptors beyond those of connections: files, sockets, the store's connections.
_OTHER_DESCRIPTORS = 256

# Sources whose usage is remembered: more than there are connections.
_SOURCES: Final = 4096

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class _Refilled:
    """Holds up to `at_once` tokens, refilled at `a_second` tokens per second."""

    def __init__(self, a_second: float, at_once: float) -> None:
        self._rate, self._burst = a_second, at_once
        self._left, self._at = at_once, time.monotonic()

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now


class Allowance(_Refilled):
    """Limits a rate by delays: a caller that consumes more tokens than are left has to wait."""

    def take(self, count: float) -> float:
        """Consumes `count` tokens; returns the seconds to wait before the next call may proceed."""
        self._refill()
        self._left -= count
        return max(0.0, -self._left / self._rate)


class Bucket(_Refilled):
    """Limits a rate by refusals: a caller that asks for more tokens than are left is refused."""

    def take(self, count: float = 1.0) -> bool:
        """Consumes `count` tokens.  If fewer are left, consumes none and returns False."""
        self._refill()
        if self._left < count:
            return False
        self._left -= count
        return True


class BySource(Generic[T]):
    """Holds one limit for each source of calls, made at its first call.

    A new source displaces the least recently used limit, so the memory is bounded.  Because a
    displaced source starts again with a full limit, all sources together need a limit as well.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._limits: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._limits)

    def of(self, source: str) -> T:
        """Returns the limit of this source."""
        found = self._limits.get(source)
        if found is None:
            if len(self._limits) >= _SOURCES:
                self._limits.popitem(last=False)
            found = self._limits[source] = self._make()
        self._limits.move_to_end(source)
        return found


class SharedAllowance:
    """Limits the rate of each source, and that of all sources together to twice as much."""

    def __init__(self, a_second: float, at_once: float) -> None:
        self._of_all = Allowance(2 * a_second, 2 * at_once)
        self._by_source = BySource(lambda: Allowance(a_second, at_once))

    def take(self, source: str, count: float) -> float:
        """Consumes `count` tokens for a source; returns the seconds that it has to wait."""
        return max(self._by_source.of(source).take(count), self._of_all.take(count))


class Turns:
    """Runs long work on the event loop one slice at a time, in the order of arrival.

    After each slice the loop stays free for longer than the slice took, so many requests at once
    do not delay steering until all of them are done.  Calls of several slices alternate, so a
    short call does not wait for the end of a long one.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most = most_waiting
        self._waiting = 0
        self._lock = asyncio.Lock()

    async def take(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`.  Raises TooManyCallsError if too many calls wait."""
        async with self.turn():
            return work()

    async def take_pieces(self, work: Generator[None, None, T]) -> T:
        """Returns the result of `work`, which yields wherever it may be interrupted.

        Raises TooManyCallsError if too many calls wait.  Work that has begun is never refused.
        """
        with self._place():
            while True:
                await self._lock.acquire()
                with self._work():
                    until = time.monotonic() + _PIECE_SECONDS
                    try:
                        while time.monotonic() < until:
                            next(work)
                    except StopIteration as end:
                        return cast("T", end.value)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Runs the block while no other call runs, for example to wait for a thread.

        Raises TooManyCallsError if too many calls wait.
        """
        with self._place():
            await self._lock.acquire()
        with self._work():
            yield

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Counts a waiting call for the duration of the block.  Raises TooManyCallsError."""
        if self._waiting >= self._most:
            raise TooManyCallsError(f"{self._most} such calls wait already: try again in a moment")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Releases the lock after the block, with a pause that is longer than the block took."""
        began = time.monotonic()
        try:
            yield
        finally:
            free = min(_FREE_TIMES * (time.monotonic() - began), _FREE_SECONDS_MAX)
            asyncio.get_running_loop().call_later(free, self._lock.release)


def message_bytes(method: str) -> int:
    """Returns the most bytes that a message to this method (/SERVICE/METHOD) may have."""
    return PROFILE_BYTES if method.rpartition("/")[2] in _PROFILE_CALLS else MESSAGE_BYTES


def server_options(settings: Settings) -> list[tuple[str, int]]:
    """Returns the gRPC options of the servers for engines, operators and readers."""
    size = settings.max_message_bytes
    return [
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
        # Otherwise a second sidecar could bind the same TCP port and receive half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.enable_channelz", int(settings.channelz)),
        *connection_options(settings.max_connections),
    ]


def connection_options(most: int) -> list[tuple[str, int]]:
    """Returns the gRPC options for connections.  most: connections on each address."""
    return [
        ("grpc.max_allowed_incoming_connections", most),
        ("grpc.max_concurrent_streams", STREAMS_A_CONNECTION),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_SECONDS),
        ("grpc.http2.settings_timeout", 1000 * HANDSHAKE_SECONDS),
        ("grpc.max_connection_idle_ms", 1000 * IDLE_SECONDS),
        ("grpc.keepalive_time_ms", 1000 * KEEPALIVE_SECONDS),
        ("grpc.keepalive_timeout_ms", 1000 * KEEPALIVE_ANSWER_SECONDS),
        ("grpc.keepalive_permit_without_calls", 1),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            1000 * CLIENT_KEEPALIVE_SECONDS_MIN,
        ),
    ]


def raise_descriptors(settings: Settings) -> None:
    """Raises the descriptor limit for all connections; logs a warning if that is not allowed."""
    wanted = _OTHER_DESCRIPTORS + settings.max_connections * (1 if settings.tcp is None else 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        _log.warning(
            "few_descriptors", allowed=most, wanted=wanted,
            detail="set a smaller CONTROLLER_MAX_CONNECTIONS, or allow more open files",
        )  # fmt: skip
