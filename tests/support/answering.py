"""An HTTP server that answers what a test wants, for clients of engines."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serve_answers(
    answers: Mapping[str, object], redirect: str = "", keys: list[str | None] | None = None
) -> Iterator[str]:
    """Serves at the URL that it yields: JSON by path, or bytes as they are; 404 for the rest.

    redirect: where it sends whoever asks for anything else.  keys: gets the key of every request.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if keys is not None:
                keys.append(self.headers["Authorization"])
            answer = answers.get(self.path)
            self.send_response(200 if answer is not None else 302 if redirect else 404)
            if answer is None and redirect:
                self.send_header("Location", redirect)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            """Keeps quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
