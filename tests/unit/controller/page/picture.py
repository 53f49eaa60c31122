"""Makes docs/images/page.png: `python -m tests.unit.controller.page.picture [FILE]`.

A real sidecar steers two real agents, whose steps are made up, for two minutes; one override is
set on the way, and one engine pauses.
"""

import sys
import tempfile
import time
from pathlib import Path

from lab.harness.processes import free_port
from tests.support.linked_engine import linked_engine
from tests.support.sidecar_process import controller, sidecar_process
from tests.unit.controller.page.chromium import chromium

_IMAGE = Path(__file__).parents[4] / "docs" / "images" / "page.png"
# (batch, acceptance, seconds); a batch of 0 is a pause.
_TRAFFIC = ((4, 0.8, 20), (12, 0.8, 20), (12, 0.45, 20), (0, 0, 12), (32, 0.45, 20), (8, 0.75, 25))


def main(image: Path) -> None:
    """Writes the image."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as browser,
        sidecar_process(Path(directory), "--page-port", str(port), "--ready-with", "guess") as it,
        linked_engine(it.address, "pod-7") as engine,
        linked_engine(it.address, "pod-8") as other,
        chromium(Path(browser)) as page,
    ):
        page.resize(1280, 1400)
        page.prefer(prefers_color_scheme="light")
        page.open(f"http://127.0.0.1:{port}")
        for number, (batch, acceptance, seconds) in enumerate(_TRAFFIC):
            if number == 3:
                controller(
                    "override", "set", "--engine", "pod-8", "--at-most", "2", "--ttl", "2h",
                    "--author", "ada", "--reason", "memory is short on this node",
                    "--address", it.address,
                )  # fmt: skip
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                if batch:
                    engine.run(20, batch, acceptance)
                other.run(10, 6, 0.6)
                # What the browser has to tell is read.
                page.value("1")
        page.wait_until("document.querySelectorAll('#overrides tbody tr').length === 1")
        image.write_bytes(page.picture(whole=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _IMAGE)
