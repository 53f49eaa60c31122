"""A sidecar, engines that log their passes, and the streams that are played on them."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from lab.cpu_engine.pace.step_log import read_log
from lab.harness.engines import Harness, Workplace, launch_sidecar, measure_profile, wait_serving
from lab.harness.errors import HarnessError
from lab.harness.sidecar import SidecarHandle
from lab.harness.terminal import Terminal
from lab.paced import engines
from lab.paced.day import Stream
from lab.paced.lost_time import DecidedPlan, decided_plans
from lab.paced.player import play
from lab.paced.plays import StreamPlay

# The log is written when the engine has become idle.
_LOG_SECONDS = 10.0


class StreamHarness(Harness):
    """A sidecar that records, and engines of lab.paced's policies.

    dilation: seconds of the machine for each of the model.
    """

    def __init__(
        self, place: Workplace, terminal: Terminal, stack: ExitStack, dilation: float = 1.0
    ) -> None:
        super().__init__(place, terminal, stack)
        self.dilation = dilation
        self._recordings = place.scratch / "recordings"
        self._sidecars: dict[str, SidecarHandle] = {}

    def sidecar(self, policy: str) -> SidecarHandle:
        """The sidecar, as far as this engine is concerned."""
        return self._sidecars[policy]

    def profile(self, policy: str, seconds: float, batch_sizes: Sequence[int]) -> Mapping[str, Any]:
        """Measures a steered engine's step costs; returns the profile's document."""
        sizes = ",".join(map(str, batch_sizes))
        engine, sidecar = self._engines[policy], self._sidecars[policy]
        text = measure_profile(self._place, engine, sidecar, seconds, "--batch-sizes", sizes)
        found: Mapping[str, Any] = json.loads(text)
        return found

    def play_once(self, policy: str, stream: Stream) -> StreamPlay:
        """Plays a stream on an engine.

        Raises HarnessError when the engine's log lacks requests, EngineFailedError when the engine
        refuses one.
        """
        engine, path = self._engines[policy], engines.log_path(policy, self._place)
        begin = read_log(path).end
        played = play(stream, engine.url)
        # What the stream's last pass has ended is written as soon as the engine is idle.
        deadline = time.monotonic() + _LOG_SECONDS
        log = read_log(path, begin)
        while len(log.requests) < stream.requests and time.monotonic() < deadline:
            time.sleep(0.1)
            log = read_log(path, begin)
        if len(log.requests) < stream.requests:
            raise HarnessError(
                f"{policy}: the log has {len(log.requests)} of {stream.requests} requests"
            )
        return StreamPlay(policy, stream, self.dilation, played, log)

    def plans(self, policy: str) -> tuple[DecidedPlan, ...]:
        """Reads what the sidecar has decided for a steered engine since it was started."""
        return decided_plans(self._recordings, policy)

    def _record_sidecar(self, policies: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the sidecar, recording, and connects to it for each of these engines."""
        variables = {**environment, "CONTROLLER_RECORD_DIRECTORY": str(self._recordings)}
        self._sidecar_child = self._stack.enter_context(
            launch_sidecar(self._place, environment=variables)
        )
        self._sidecar_child.prefer()
        for policy in policies:
            handle = SidecarHandle(self._place.address, policy)
            self._sidecars[policy] = self._stack.enter_context(handle)
            wait_serving(self._sidecar_child, handle)
