"""Limits what one client, or many, may take of a sidecar: connections, calls, time, bytes.

How often who may call is the guard's business (`guard`); what a message may hold, that of the
types it becomes.
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

# A connection on which nobody has greeted or acknowledged the server's settings, and one that has
# had no call, are closed after these.  Until a client has acknowledged them, gRPC takes 16 MiB of
# headers from it.
HANDSHAKE_SECONDS: Final = 10
IDLE_SECONDS: Final = 300
# A peer that is silent for so long is asked, and let go when it does not answer.
KEEPALIVE_SECONDS: Final = 60
KEEPALIVE_ANSWER_SECONDS: Final = 20
# Clients may ask, too, with a call or without one: each time at least so long after the last.
# grpc-go's clients ask every 10 s at the soonest, proxies and load balancers less often; half of it
# leaves room for delays.  Of faster ones the connection ends at the third.
CLIENT_KEEPALIVE_SECONDS_MIN: Final = 5
# Calls under way of one connection: an agent has two, and clients queue what goes beyond it.
STREAMS_A_CONNECTION: Final = 1024
# A message is parsed on the event loop, which 128 KiB take for 6 ms at worst (reports that say
# nothing).  A profile is one text, which takes little to parse; the text is read by a thread.
MESSAGE_BYTES: Final = 128 * 1024
PROFILE_BYTES: Final = 1024 * 1024
# Lists and explanations that may wait on one server; its guard lets no more in at once.
READS_WAITING: Final = 400
_PROFILE_CALLS: Final = frozenset({"InstallProfile", "PushProfile"})
# Work that can be interrupted has the event loop for so long at a time.
_PIECE_SECONDS: Final = 0.002
# After a piece of such work the event loop is free for so many times as long as the piece took.
# Introductions, decisions and lists each have turns of their own: with decisions, which take half
# of the loop at most, all of them together leave it free, so that new calls are taken at once.
_FREE_TIMES: Final = 3.0
# But for so long at most: work that waits for a thread or the store does not occupy the loop.
_FREE_SECONDS_MAX: Final = 0.25
# Descriptors beyond those of connections: files, sockets, the store's.
_OTHER_DESCRIPTORS = 256

# Sources of which it is remembered what they have taken: more than there are connections.
_SOURCES: Final = 4096

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class _Refilled:
    """Has so many at once, and gets so many a second until it has them again."""

    def __init__(self, a_second: float, at_once: float) -> None:
        self._rate, self._burst = a_second, at_once
        self._left, self._at = at_once, time.monotonic()

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now


class Allowance(_Refilled):
    """Allows so many a second, and so many at once; whoever takes more has to wait."""

    def take(self, count: float) -> float:
        """Takes so many; the seconds to wait before the next are taken."""
        self._refill()
        self._left -= count
        return max(0.0, -self._left / self._rate)


class Bucket(_Refilled):
    """Allows so many a second, and so many at once; whoever wants more is refused."""

    def take(self, count: float = 1.0) -> bool:
        """Takes so many; False, and nothing is taken, when fewer are left."""
        self._refill()
        if self._left < count:
            return False
        self._left -= count
        return True


class BySource(Generic[T]):
    """Holds one limit for each source of calls, made when a source first calls.

    The limit of the source that has been silent for longest is forgotten for a new one, so that
    many sources take no more memory; what all of them may take has to be limited beside this.
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
    """Allows each source so many a second, and so many at once; all sources twice as many."""

    def __init__(self, a_second: float, at_once: float) -> None:
        self._of_all = Allowance(2 * a_second, 2 * at_once)
        self._by_source = BySource(lambda: Allowance(a_second, at_once))

    def take(self, source: str, count: float) -> float:
        """Takes so many for a source; the seconds that it has to wait."""
        return max(self._by_source.of(source).take(count), self._of_all.take(count))


class Turns:
    """Takes turns at work that occupies the event loop for long: one piece at a time.

    After each piece the loop is left free for longer than the piece took, so that whoever asks for
    many at once does not keep steering waiting for all of them.  Calls of several pieces alternate:
    a short one does not wait for the end of a long one.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most = most_waiting
        self._waiting = 0
        self._lock = asyncio.Lock()

    async def take(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`.  Raises TooManyCallsError when too many wait."""
        async with self.turn():
            return work()

    async def take_pieces(self, work: Generator[None, None, T]) -> T:
        """Returns the result of `work`, which yields wherever it may be interrupted.

        Raises TooManyCallsError when too many wait; work that has begun is never refused.
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
        """Has the block run alone, for work that waits for a thread, say.

        Raises TooManyCallsError when too many wait.
        """
        with self._place():
            await self._lock.acquire()
        with self._work():
            yield

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Counts a call among those that wait."""
        if self._waiting >= self._most:
            raise TooManyCallsError(f"{self._most} such calls wait already: try again in a moment")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Leaves the loop free after the block, for longer than it took."""
        began = time.monotonic()
        try:
            yield
        finally:
            free = min(_FREE_TIMES * (time.monotonic() - began), _FREE_SECONDS_MAX)
            asyncio.get_running_loop().call_later(free, self._lock.release)


def message_bytes(method: str) -> int:
    """The most that a message to this method (/SERVICE/METHOD) may have."""
    return PROFILE_BYTES if method.rpartition("/")[2] in _PROFILE_CALLS else MESSAGE_BYTES


def server_options(settings: Settings) -> list[tuple[str, int]]:
    """gRPC's, of the sockets that engines, operators and readers call on."""
    size = settings.max_message_bytes
    return [
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
        # Or a second sidecar could bind the same TCP port and take half the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.enable_channelz", int(settings.channelz)),
        *connection_options(settings.max_connections),
    ]


def connection_options(most: int) -> list[tuple[str, int]]:
    """gRPC's, for so many connections on each address."""
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
    """Lets this process hold all connections that it takes; logs a warning where it may not."""
    wanted = _OTHER_DESCRIPTORS + settings.max_connections * (1 if settings.tcp is None else 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        _log.warning(
            "few_descriptors", allowed=most, wanted=wanted,
            detail="name a smaller CONTROLLER_MAX_CONNECTIONS, or allow more open files",
        )  # fmt: skip
