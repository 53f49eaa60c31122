"""A real browser without a screen, over the DevTools protocol."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.support.eventually import eventually

# A browser on a busy machine.
PATIENCE_SECONDS = 60.0
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-extensions", "--remote-debugging-port=0",
    "--remote-allow-origins=*", "--hide-scrollbars",
)  # fmt: skip
_KEYS = {
    "Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38,
    "ArrowRight": 39, "ArrowDown": 40, "+": 187, "-": 189,
}  # fmt: skip

# Observers of sizes run in a frame after the layout, which comes after the frame's callbacks.
_TWO_FRAMES = "new Promise(kept => requestAnimationFrame(() => requestAnimationFrame(kept)))"


class Page:
    """One tab.  requests: every URL that it has asked for; problems: what its console complains."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self._session = ""
        self._pressed = False
        self.requests: list[str] = []
        self.problems: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Its result; events that come before it are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE_SECONDS))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.problems.append(json.dumps(params["entry"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning"}:
            self.problems.append(json.dumps(params["args"]))

    def open(self, url: str) -> None:
        """Until it is loaded."""
        self.command("Page.navigate", url=url)
        self.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """Of JavaScript; a promise's, once it is kept."""
        reply = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait_until(self, expression: str) -> Any:
        """The expression's first true value."""
        return eventually(
            lambda: self.value(expression),
            timeout_seconds=PATIENCE_SECONDS,
            description=f"true: {expression}",
        )

    def press(self, key: str) -> None:
        """One key."""
        text = "\r" if key == "Enter" else ""
        where = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **where)
        self.command("Input.dispatchKeyEvent", type="keyUp", **where)

    def point(self, x: float, y: float, kind: str = "mouseMoved") -> None:
        """The mouse, which holds its button while it is pressed."""
        held = 0 if kind == "mouseMoved" and not self._pressed else 1
        self._pressed = kind == "mousePressed" or (self._pressed and kind != "mouseReleased")
        self.command(
            "Input.dispatchMouseEvent",
            type=kind, x=x, y=y, button="left" if held else "none", buttons=held, clickCount=held,
        )  # fmt: skip

    def drag(self, x: float, to_x: float, y: float) -> None:
        """From one point to another with the button held."""
        self.point(x, y)
        self.point(x, y, "mousePressed")
        for step in range(1, 5):
            self.point(x + (to_x - x) * step / 4, y)
        self.point(to_x, y, "mouseReleased")

    def first(self, script: str) -> None:
        """A script that runs in every page before the page's own."""
        self.command("Page.addScriptToEvaluateOnNewDocument", source=script)

    def prefer(self, **features: str) -> None:
        """Media features as the system would have them (`prefers_color_scheme="dark"`)."""
        named = [{"name": n.replace("_", "-"), "value": value} for n, value in features.items()]
        self.command("Emulation.setEmulatedMedia", features=named)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """The window; returns once the page is laid out and its observers have run."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=False,
        )  # fmt: skip
        self.wait_until(f"innerWidth === {width} && innerHeight === {height}")
        self.value(_TWO_FRAMES)

    def picture(self, whole: bool = True) -> bytes:
        """PNG of the whole page, or of what the window shows of it."""
        reply = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(reply["data"])


@contextmanager
def chromium(directory: Path) -> Iterator[Page]:
    """A browser with one tab; `directory` is its own."""
    program = shutil.which("chromium")
    assert program, "chromium is needed (Debian: apt-get install chromium)"
    port_file = directory / "DevToolsActivePort"
    command = [program, *_FLAGS, f"--user-data-dir={directory}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            port, path = eventually(
                lambda: (port_file.exists() and port_file.read_text().split()[:2]) or None,
                timeout_seconds=PATIENCE_SECONDS,
                description="a browser that listens",
            )
            with connect(
                f"ws://127.0.0.1:{port}{path}",
                max_size=None, open_timeout=PATIENCE_SECONDS, proxy=None, ping_interval=None,
            ) as socket:  # fmt: skip
                yield Page(socket)
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)
