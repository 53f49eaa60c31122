"""An HTTP server that closes every kept-alive connection in the moment in which it is used again.

That is what a client sees when it sends a request while the server ends an idle connection.  Here
it happens at every reuse, not once in some thousand.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class ClosingServer:
    """`with ClosingServer() as server`: answers as SGLang does, one request a connection.

    requests: paths in the order in which they came.  reused: requests that came on a connection
    which had already carried one; they are never answered.  lose: how many generations to drop
    without an answer although their connection is new.  aborts: how many requests must be aborted
    before a generation is answered.
    """

    def __init__(self, lose: int = 0, aborts: int = 0) -> None:
        self.requests: list[str] = []
        self.reused = 0
        self.lose = lose
        self._lock = threading.Lock()
        self._aborts = threading.Semaphore(0)
        self._aborts_needed = aborts
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                self.answered = 0

            def do_POST(self) -> None:
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}"
                )
                if self.answered or outer._is_lost(self.path):
                    outer.reused += self.answered
                    self.close_connection = True
                    return
                self.answered = 1
                content = json.dumps(outer._answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                # BaseHTTPRequestHandler honours the client's "Connection: close"; this server keeps
                # the connection open as long as the client does.
                self.close_connection = False

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _is_lost(self, path: str) -> bool:
        with self._lock:
            self.requests.append(path.partition("?")[0])
            if path != "/generate" or self.lose <= 0:
                return False
            self.lose -= 1
            return True

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/abort_request":
            self._aborts.release()
        if path != "/generate":
            return {}
        for _ in range(self._aborts_needed):
            self._aborts.acquire(timeout=10)
        count = body["sampling_params"]["max_new_tokens"]
        meta = {"finish_reason": {"type": "length"}}
        return {"output_ids": [body["input_ids"][0]] * count, "meta_info": meta}
