"""Limits what one client, or many, may use of a sidecar: connections, time, bytes.

The rate of calls, and its numbers, are in `guard`; the token bucket that it uses is here.  Message
content is limited by the types that messages are converted to.
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
STREAMS_PER_CONNECTION: Final = 1024
# A message is parsed on the event loop: 128 KiB take 6 ms at worst (empty reports).  A profile is
# one text, whose message is cheap to parse; a thread then reads the text.
MESSAGE_BYTES_MAX: Final = 128 * 1024
PROFILE_BYTES_MAX: Final = 1024 * 1024
# Lists and explanations that may wait on one server; its guard admits no more at a time.
WAITING_READS_MAX: Final = 400
_PROFILE_CALLS: Final = frozenset({"InstallProfile", "PushProfile"})
# The longest slice of interruptible work on the event loop.
_SLICE_SECONDS: Final = 0.002
# After a slice the event loop stays free for this multiple of the slice's time.  Introductions,
# decisions and lists each have a queue of their own.  Decisions take at most half of the loop, so
# all of them together leave time to accept new calls at once.
_PAUSE_FACTOR: Final = 3.0
# The longest such pause: work that waits for a thread or the store does not occupy the loop.
_PAUSE_SECONDS_MAX: Final = 0.25
# File descriptors beyond those of connections: files, sockets, the store's connections.
_OTHER_DESCRIPTORS = 256

# Sources whose usage is remembered: more than there are connections.
_SOURCES_MAX: Final = 4096

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class _RefilledTokens:
    """Holds up to `burst` tokens, refilled at `rate_per_second` tokens per second."""

    def __init__(self, rate_per_second: float, burst: float) -> None:
        self._rate_per_second, self._burst = rate_per_second, burst
        self._tokens, self._refilled_at = burst, time.monotonic()

    def _refill(self) -> None:
        now = time.monotonic()
        self._tokens = min(
            self._burst, self._tokens + (now - self._refilled_at) * self._rate_per_second
        )
        self._refilled_at = now


class RateLimit(_RefilledTokens):
    """Limits a rate by delays: a caller that consumes more tokens than are left has to wait."""

    def consume(self, count: float) -> float:
        """Consumes `count` tokens; returns the seconds to wait before the next call may proceed."""
        self._refill()
        self._tokens -= count
        return max(0.0, -self._tokens / self._rate_per_second)


class TokenBucket(_RefilledTokens):
    """Limits a rate by refusals: a caller that asks for more tokens than are left is refused."""

    def try_consume(self, count: float = 1.0) -> bool:
        """Consumes `count` tokens.  If fewer are left, consumes none and returns False."""
        self._refill()
        if self._tokens < count:
            return False
        self._tokens -= count
        return True


class LimitBySource(Generic[T]):
    """Holds one limit for each source of calls, made at its first call.

    A new source displaces the least recently used limit, so the memory is bounded.  Because a
    displaced source starts again with a full limit, all sources together need a limit as well.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._limits: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._limits)

    def limit_for(self, source: str) -> T:
        """Returns the limit of this source."""
        limit = self._limits.get(source)
        if limit is None:
            if len(self._limits) >= _SOURCES_MAX:
                self._limits.popitem(last=False)
            limit = self._limits[source] = self._make()
        self._limits.move_to_end(source)
        return limit


class SharedRateLimit:
    """Limits the rate of each source, and that of all sources together to twice as much."""

    def __init__(self, rate_per_second: float, burst: float) -> None:
        self._total = RateLimit(2 * rate_per_second, 2 * burst)
        self._by_source = LimitBySource(lambda: RateLimit(rate_per_second, burst))

    def consume(self, source: str, count: float) -> float:
        """Consumes `count` tokens for a source; returns the seconds that it has to wait."""
        return max(self._by_source.limit_for(source).consume(count), self._total.consume(count))


class FairQueue:
    """Runs long work on the event loop one slice at a time, in the order of arrival.

    After each slice the loop stays free for longer than the slice took, and many requests at once
    do not delay steering until all of them are done.  Calls of several slices alternate, so a short
    call does not wait for the end of a long one.
    """

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._waiting = 0
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`.  Raises TooManyCallsError if too many calls wait."""
        async with self.turn():
            return work()

    async def run_sliced(self, work: Generator[None, None, T]) -> T:
        """Returns the result of `work`, which yields wherever it may be interrupted.

        Raises TooManyCallsError if too many calls wait.  Work that has begun is never refused.
        """
        with self._count_waiting():
            while True:
                await self._lock.acquire()
                with self._release_after_pause():
                    deadline = time.monotonic() + _SLICE_SECONDS
                    try:
                        while time.monotonic() < deadline:
                            next(work)
                    except StopIteration as end:
                        return cast("T", end.value)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Runs the block while no other call runs, for example to wait for a thread.

        Raises TooManyCallsError if too many calls wait.
        """
        with self._count_waiting():
            await self._lock.acquire()
        with self._release_after_pause():
            yield

    @contextmanager
    def _count_waiting(self) -> Iterator[None]:
        """Counts a waiting call for the duration of the block.  Raises TooManyCallsError."""
        if self._waiting >= self._waiting_max:
            raise TooManyCallsError(
                f"{self._waiting_max} such calls wait already: try again in a moment"
            )
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @contextmanager
    def _release_after_pause(self) -> Iterator[None]:
        """Releases the lock after the block, with a pause that is longer than the block took."""
        began = time.monotonic()
        try:
            yield
        finally:
            pause_seconds = min(_PAUSE_FACTOR * (time.monotonic() - began), _PAUSE_SECONDS_MAX)
            asyncio.get_running_loop().call_later(pause_seconds, self._lock.release)


def message_bytes_max(method: str) -> int:
    """Returns the most bytes that a message to this method (/SERVICE/METHOD) may have."""
    return PROFILE_BYTES_MAX if method.rpartition("/")[2] in _PROFILE_CALLS else MESSAGE_BYTES_MAX


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


def connection_options(connections_max: int) -> list[tuple[str, int]]:
    """Returns the gRPC options for connections.  connections_max: connections on each address."""
    return [
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
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


def raise_descriptor_limit(settings: Settings) -> None:
    """Raises the descriptor limit for all connections; logs a warning if that is not allowed."""
    needed = _OTHER_DESCRIPTORS + settings.max_connections * (1 if settings.tcp is None else 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        _log.warning(
            "few_descriptors", allowed=allowed, wanted=needed,
            detail="set a smaller CONTROLLER_MAX_CONNECTIONS, or allow more open files",
        )  # fmt: skip
