"""A real Prometheus that scrapes one sidecar and evaluates the shipped rules."""

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.harness.processes import free_port
from tests.support.eventually import eventually

ALERTS = Path(__file__).resolve().parents[2] / "deploy" / "monitoring" / "alerts.yml"
# What the rules and the dashboard call it.
JOB = "speculation-controller"
PATIENCE_SECONDS = 60.0


def find_tool(name: str) -> str:
    """Its path; a test that needs it fails without it."""
    path = shutil.which(name)
    assert path is not None, f"{name} is missing (Debian: apt-get install prometheus)"
    return path


class PrometheusServer:
    """Its HTTP API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.HTTPError):
            return False

    def api(self, path: str, **parameters: str) -> Any:
        """The data of an answer; fails on what the server refuses."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}?{query}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query, at the newest scrape that succeeded.

        After one that failed, as on a busy machine where it takes longer than the interval, every
        series has ended until the next.
        """
        scrape_time = eventually(
            self._last_scrape_time,
            timeout_seconds=PATIENCE_SECONDS,
            description="a scrape that succeeds",
        )
        return list(self.api("query", query=expression, time=scrape_time)["result"])

    def _last_scrape_time(self) -> str:
        """The time of the newest scrape, in seconds, as Prometheus writes it; "" if it failed."""
        up_metric = f'up{{job="{JOB}"}}'
        samples = self.api("query", query=f"timestamp({up_metric}) and {up_metric} == 1")["result"]
        return str(samples[0]["value"][1]) if samples else ""

    def value(self, expression: str) -> float:
        """Of the one sample that it has."""
        (sample,) = self.query(expression)
        return float(sample["value"][1])


@contextmanager
def prometheus(folder: Path, sidecar_port: int) -> Iterator[PrometheusServer]:
    """Runs inside the block."""
    settings = {
        "global": {"scrape_interval": "250ms", "evaluation_interval": "250ms"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": JOB, "static_configs": [{"targets": [f"127.0.0.1:{sidecar_port}"]}]}
        ],
    }
    configuration = folder / "prometheus.yml"
    configuration.write_text(json.dumps(settings))  # which is YAML as well
    port = free_port()
    command = [
        find_tool("prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.log"
    with (
        log.open("wb") as log_file,
        subprocess.Popen(command, stdout=log_file, stderr=log_file) as process,
    ):
        server = PrometheusServer(port)
        try:

            def is_up() -> bool:
                assert process.poll() is None, log.read_text()
                return server.is_ready()

            eventually(is_up, timeout_seconds=PATIENCE_SECONDS, description="Prometheus is ready")
            yield server
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def promtool(*arguments: str | Path) -> str:
    """What it says; fails with that where it finds fault."""
    command = [find_tool("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
