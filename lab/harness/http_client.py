"""The HTTP client with which the load generator talks to an engine."""

import aiohttp


def engine_session(url: str, timeout_seconds: float) -> aiohttp.ClientSession:
    """A session for the engine at `url` that opens a new connection for every request.

    An HTTP server closes a connection that has been idle for some seconds (uvicorn: 5 s).  A client
    that reuses such a connection in the same moment loses its request, and a generation cannot be
    sent again silently.  A new connection on loopback costs less than a millisecond.

    timeout_seconds: for one whole request, from connecting to the last byte of the answer.
    """
    return aiohttp.ClientSession(
        url,
        timeout=aiohttp.ClientTimeout(total=timeout_seconds),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    )
