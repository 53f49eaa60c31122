"""HTTP/2 by hand, frame by frame: what no gRPC client would send."""

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_CANCEL = 8
# A server that is well answers within it, on a machine that is busy.
_PATIENCE_SECONDS = 120.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def headers_of(path: str, more: Sequence[tuple[str, str]] = ()) -> bytes:
    """A gRPC call's headers, plainly coded."""
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
        ("content-type", "application/grpc"), ("te", "trailers"), *more,
    ]  # fmt: skip
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)


def _text(value: str) -> bytes:
    raw = value.encode()
    if len(raw) < 127:
        return bytes([len(raw)]) + raw
    left, size = len(raw) - 127, b"\x7f"
    while left >= 128:
        size += bytes([left % 128 + 128])
        left //= 128
    return size + bytes([left]) + raw


def message_head(size: int) -> bytes:
    """The header before a message of `size` bytes."""
    return struct.pack(">BI", 0, size)


class Connection:
    """A client that says what it likes."""

    def __init__(self, address: str) -> None:
        """address: unix:PATH or HOST:PORT."""
        if address.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(_PATIENCE_SECONDS)
        self._stream = -1

    def greet(self) -> None:
        """As every client begins; not every one acknowledges the server's settings."""
        self.say(PREFACE + frame(SETTINGS, 0, 0))

    def acknowledge(self) -> None:
        """Takes the server's settings, so that they are in force."""
        self.say(frame(SETTINGS, ACK, 0))

    def say(self, data: bytes) -> bool:
        """False once the server has hung up."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def call(self, path: str, more: Sequence[tuple[str, str]] = ()) -> int:
        """Opens a call that continues; returns its stream."""
        self._stream += 2
        self.say(frame(HEADERS, END_HEADERS, self._stream, headers_of(path, more)))
        return self._stream

    def data(self, stream: int, payload: bytes) -> bool:
        """A stretch of a call's messages."""
        return self.say(frame(DATA, 0, stream, payload))

    def cancel(self, stream: int) -> bool:
        """Takes a call back."""
        return self.say(frame(RST_STREAM, 0, stream, _CANCEL.to_bytes(4, "big")))

    def hung_up(self) -> bool:
        """Reads on to the end of the connection; False where none came in time."""
        try:
            while self.socket.recv(65_536):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True


@contextmanager
def connections(address: str, count: int) -> Iterator[list[Connection]]:
    """`count` connections at a time, as far as the server accepts them."""
    open_connections: list[Connection] = []
    try:
        for _ in range(count):
            try:
                open_connections.append(Connection(address))
            except OSError:
                break
        yield open_connections
    finally:
        for connection in open_connections:
            connection.socket.close()
