"""A channel for calls that only read: through the operators' socket where that is possible.

There, the calls of engines and of others cannot use up what a sidecar answers in a second.  Who may
not read there, because the access list names other users or because too many operators are
connected, reads through the engines' socket.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc

from controller.client.credentials import Credentials
from controller.util.socket_paths import reading_addresses

# What the operators' socket answers to those who have to ask elsewhere.
_ELSEWHERE = frozenset(
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


def reading_channel(
    credentials: Credentials, address: str, *options: tuple[str, int | str]
) -> grpc.Channel:
    """Makes a channel that is not connected yet, for calls that can be repeated without harm.

    address: of the sidecar.  A call that the operators' socket refuses is made there.
    """
    first, *others = [credentials.channel(found, *options) for found in reading_addresses(address)]
    return _ReadingChannel(first, others[0]) if others else first


class _ReadingChannel(grpc.Channel):
    """Asks `first`, and `other` what is refused there."""

    def __init__(self, first: grpc.Channel, other: grpc.Channel) -> None:
        self._first, self._other = first, other

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        first = self._first.unary_unary(*arguments, **options)
        other = self._other.unary_unary(*arguments, **options)

        def call(request: Any, **of_call: Any) -> Any:
            try:
                return first(request, **of_call)
            except grpc.RpcError as error:
                if not _is_refused(error):
                    raise
            return other(request, **of_call)

        return call

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        first = self._first.unary_stream(*arguments, **options)
        other = self._other.unary_stream(*arguments, **options)
        return lambda request, **of_call: _Answers(
            lambda: first(request, **of_call), lambda: other(request, **of_call)
        )

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._other.stream_unary(*arguments, **options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._other.stream_stream(*arguments, **options)

    def subscribe(self, callback: Any, try_to_connect: Any = False) -> None:
        self._first.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._first.unsubscribe(callback)

    def close(self) -> None:
        self._first.close()
        self._other.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Answers:
    """Iterates over the answers of a call that answers with a stream."""

    def __init__(self, first: Callable[[], Any], other: Callable[[], Any]) -> None:
        self._call, self._other = first(), other
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            answer = next(self._call)
        except grpc.RpcError as error:
            if self._has_begun or not _is_refused(error):
                raise
            self._call = self._other()
            answer = next(self._call)
        self._has_begun = True
        return answer

    def cancel(self) -> None:
        """Ends the call."""
        self._call.cancel()


def _is_refused(error: grpc.RpcError) -> bool:
    """Whether the operators' socket, or the server behind it, does not take the call."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        # What a sidecar is away for says something else.
        return "failed to connect" in (error.details() or "")
    return error.code() in _ELSEWHERE
