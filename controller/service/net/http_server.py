"""HTTP on threads: a bounded number of requests at a time, each for a bounded time.

A silent client is disconnected after CLIENT_TIMEOUT_SECONDS.  Any request, its answer included, may
take at most REQUEST_SECONDS, so a client that sends single bytes is disconnected too.
"""

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Final
from urllib.parse import urlsplit

import structlog

from controller.service.net.errors import AddressTakenError
from controller.settings.listeners import Listener
from controller.util.sockets import is_loopback_host
from controller.util.tasks import supervise_thread

# Concurrent requests; further ones are answered with "503 Service Unavailable".
REQUESTS_MAX: Final = 8
# A client that sends nothing, or reads nothing, for this time is disconnected.
CLIENT_TIMEOUT_SECONDS: Final = 5.0
# Any client is disconnected after this time.
REQUEST_SECONDS: Final = 15.0
_EVERY_ADDRESS: Final = "::"
# How often it checks for such clients, and whether it is to stop.
_POLL_SECONDS = 0.1

_log = structlog.get_logger(__name__)


class HttpServer(ThreadingHTTPServer):
    """Serves until it is closed, on a thread called `name`.  Raises AddressTakenError.

    listener: its host may be a name; `::` includes IPv4.  name: also the prefix of the setting
    NAME_port.  content_name: what is served, for error messages.
    """

    daemon_threads = True
    # Excess clients are refused at once, and do not wait for TCP's retransmission.
    request_queue_size = 128

    def __init__(
        self,
        listener: Listener,
        handler: type[BaseHTTPRequestHandler],
        name: str,
        content_name: str,
    ) -> None:
        host = listener.host
        if host == _EVERY_ADDRESS and not socket.has_dualstack_ipv6():
            # The kernel has no IPv6, so these are all addresses.
            host = "0.0.0.0"  # noqa: S104  # asked for
        if ":" in host:
            self.address_family = socket.AF_INET6
        self._free_slots = threading.BoundedSemaphore(REQUESTS_MAX)
        # Open sockets, and when they are disconnected.
        self._deadlines: dict[socket.socket, float] = {}
        self.is_loopback = is_loopback_host(host)
        try:
            super().__init__((host, listener.port), handler)
        except OSError as error:
            raise AddressTakenError(
                f"{content_name} cannot be served on {listener.address}: {error.strerror}; choose "
                f"another port with --{name}-port, or 0 for none"
            ) from error
        self._name = name
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_SECONDS,), name=self._name, daemon=True
        )
        self._thread.start()
        return self._thread

    def accepts_host(self, header: str) -> bool:
        """Whether a request with this Host header (HOST or HOST:PORT) is answered.

        On a loopback address the header must name a loopback host.  This stops DNS rebinding: a
        foreign web page whose domain name resolves to this machine.
        """
        if not self.is_loopback:
            return True
        try:
            return is_loopback_host(urlsplit(f"//{header}").hostname or "")
        except ValueError:
            return False

    async def watch_thread(self) -> None:
        """Watches the thread; when it has ended, starts it again and raises TaskEndedError."""
        await supervise_thread(self._thread, self._start)

    def server_bind(self) -> None:
        """Binds the socket without a look-up of the machine's own name."""
        if self.server_address[0] == _EVERY_ADDRESS:
            # Independent of the system's default (net.ipv6.bindv6only).
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a request on a thread, or answers 503 if REQUESTS_MAX are under way."""
        if not self._free_slots.acquire(blocking=False):
            request.settimeout(0)
            with contextlib.suppress(OSError):
                request.send(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\n\r\n")
            self.shutdown_request(request)
            return
        self._deadlines[request] = time.monotonic() + REQUEST_SECONDS
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._deadlines.pop(request, None)
            self._free_slots.release()

    def service_actions(self) -> None:
        """Shuts down the sockets whose time is up; their threads then read an end of file."""
        now = time.monotonic()
        for request, deadline in list(self._deadlines.items()):
            if deadline <= now:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error of a request; usually the client has disconnected."""
        _log.debug("request_broke", exc_info=True)

    def close(self) -> None:
        """Stops the server and waits for its thread.  It must not be called on the event loop."""
        self.shutdown()
        self.server_close()
        self._thread.join()
