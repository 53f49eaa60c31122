"""Runs policies on engines that log their passes: start, dilation, profile, plays.

A `StreamHarness` takes engines at any pace; a `PacedHarness` has paced ones, two at a time.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from controller.util.files import write_atomically
from lab.cpu_engine.pace.pacer import Pace
from lab.cpu_engine.pace.step_log import LoggedStep, await_log, read_log
from lab.harness.engines import Harness, Workplace, launch_sidecar, measure_profile, wait_serving
from lab.harness.errors import HarnessError
from lab.harness.sidecar import SidecarHandle
from lab.harness.terminal import Terminal
from lab.paced import engines
from lab.paced.engines import Setting, is_steered
from lab.paced.lost_time import DecidedPlan, decided_plans
from lab.paced.plays import LATE_SHARE_MAX, StreamPlay
from lab.paced.traffic import Stream, warm_up_stream

# Dilations to choose from.
DILATIONS = (3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)
# Factor on the 95th percentile of a warm engine's work, for steering and a busier machine.
_HEADROOM = 1.6
# Two engines fit on two cores: each sleeps most of the time.
_SIDE_BY_SIDE = 2
# Time constants of the sidecar's decisions, in seconds of the model's time.
_PLANNER_SECONDS = {
    "REPLAN_SECONDS": 0.07,
    "LEASE_SECONDS": 5.0,
    "PAYBACK_SECONDS": 2.0,
    "PROBE_CREDIT_START_SECONDS": 0.05,
    "PROBE_CREDIT_MAX_SECONDS": 0.5,
}


def profile_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The batch sizes of a profile: 1, 4, 16, ... and the largest."""
    sizes = [1]
    while sizes[-1] * 4 < max_batch_size:
        sizes.append(sizes[-1] * 4)
    return tuple(dict.fromkeys((*sizes, max_batch_size)))


def dilated_planner(dilation: float) -> dict[str, str]:
    """The sidecar's variables that scale its time constants to the model's time."""
    return {
        f"CONTROLLER_PLANNER__{name}": f"{seconds * dilation:g}"
        for name, seconds in _PLANNER_SECONDS.items()
    }


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
        """The handle with which this engine is read and pinned at the sidecar."""
        return self._sidecars[policy]

    def profile(self, policy: str, seconds: float, batch_sizes: Sequence[int]) -> Mapping[str, Any]:
        """Measures a steered engine's step costs; returns the profile's document."""
        sizes = ",".join(map(str, batch_sizes))
        engine, sidecar = self._engines[policy], self._sidecars[policy]
        text = measure_profile(self._place, engine, sidecar, seconds, "--batch-sizes", sizes)
        document: Mapping[str, Any] = json.loads(text)
        return document

    def play_once(self, policy: str, stream: Stream) -> StreamPlay:
        """Plays a stream on an engine.

        Raises HarnessError when the engine's log lacks requests, EngineFailedError when the engine
        refuses one.
        """
        engine, path = self._engines[policy], engines.log_path(policy, self._place)
        begin = read_log(path).end
        played = engine.play_overlapping(stream.phases)
        log = await_log(path, begin, stream.requests)
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
        self._sidecar_child.raise_priority()
        for policy in policies:
            handle = SidecarHandle(self._place.address, policy)
            self._sidecars[policy] = self._stack.enter_context(handle)
            wait_serving(self._sidecar_child, handle)


class PacedHarness(StreamHarness):
    """A sidecar and paced engines.  The context of `stack` ends them all.

    trained: the folder of a trained set of models; None: dummies are made.
    """

    # A play with a larger share of late passes is rejected.
    late_share_max: float = LATE_SHARE_MAX

    def __init__(
        self,
        place: Workplace,
        terminal: Terminal,
        stack: ExitStack,
        pace: Pace,
        max_batch_size: int,
        *,
        second: bool = False,
        predictor: bool = False,
        trained: Path | None = None,
    ) -> None:
        super().__init__(place, terminal, stack, pace.dilation)
        self._dilation_file = place.scratch / "dilation"
        self._write_dilation()
        pace = replace(pace, dilation_file=str(self._dilation_file))
        if trained is None:
            self.setting = Setting.make(
                pace, place.scratch / "models", max_batch_size, second=second, predictor=predictor
            )
        else:
            self.setting = Setting(pace, trained, max_batch_size, trained=True)

    def start(
        self,
        policies: Sequence[str],
        extra_variables: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Starts engines side by side and waits until they serve; none is steered yet.

        extra_variables: policy -> further variables.
        """
        variables_by_policy = extra_variables or {}
        with self._terminal.show_progress(f"engines: {', '.join(policies)}") as work:
            launched = [
                self._register_engine(
                    engines.launch(
                        policy, self.setting, self._place, variables_by_policy.get(policy)
                    )
                )
                for policy in policies
            ]
            for engine in launched:
                engine.child.raise_priority()
                start_time = time.monotonic()

                def tick(policy: str = engine.policy, start_time: float = start_time) -> None:
                    work.update(f"{policy}, {time.monotonic() - start_time:.0f} s")

                engine.wait_ready(engines.READY_SECONDS, tick)

    def find_dilation(
        self, policies: Sequence[str], *, fixed: bool, stream: Stream | None = None
    ) -> None:
        """Warms engines up and chooses the dilation that leaves room for their own work.

        fixed: the dilation stands.  stream: the warm-up, for engines with models of their own.
        Raises HarnessError when the machine is too slow for any.
        """
        if stream is None:
            stream = warm_up_stream(self._kinds(), self.setting.max_batch_size)
        with self._terminal.show_progress("warming up, and finding the dilation") as work:
            plays = self._run_side_by_side(
                {p: partial(self.play_once, p, stream) for p in policies}
            )
            needed = max(_needed_dilation(play.log.steps) for play in plays.values())
            if not fixed:
                candidates = [d for d in DILATIONS if d >= needed * _HEADROOM]
                if not candidates:
                    raise HarnessError(
                        f"this machine needs {needed:.1f} times a step's pace for its own work, "
                        f"more than a dilation of {DILATIONS[-1]:g} leaves; stop what else runs, "
                        "or name a --dilation"
                    )
                self.dilation = candidates[0]
                self._write_dilation()
            work.result = f"{self.dilation:g} (the engines' own work takes {needed:.1f})"

    def start_sidecar(self, policies: Sequence[str]) -> None:
        """Starts the sidecar, recording, and waits until it knows the steered engines."""
        with self._terminal.show_progress("sidecar: controller serve") as work:
            steered = list(filter(is_steered, policies))
            self._record_sidecar(steered, dilated_planner(self.dilation))
            for policy in steered:
                sidecar = self._sidecars[policy]
                self._engines[policy].wait_ready(engines.READY_SECONDS, sidecar=sidecar)
            work.result = f"on {self._place.address}"

    def play_all(
        self, jobs: Mapping[str, Callable[[], StreamPlay]], text: str
    ) -> Mapping[str, StreamPlay]:
        """Runs plays, two at a time, each of another engine."""
        with self._terminal.show_progress(text) as work:
            plays = self._run_side_by_side(jobs)
            work.result = ", ".join(f"{n} {p.tokens_per_second:.0f}" for n, p in plays.items())
        return plays

    def play_paced(self, policy: str, stream: Stream) -> StreamPlay:
        """Plays a stream; once more if too many passes were late.

        A steered engine then knows the traffic from the first time, as it does in every further
        repeat.  Raises HarnessError when the second play was late too.
        """
        play = self.play_once(policy, stream)
        if play.late_share > self.late_share_max:
            self._terminal.say(
                f"{policy}: {play.late_share:.1%} of the passes were late; it is played again"
            )
            play = self.play_once(policy, stream)
        if play.late_share > self.late_share_max:
            raise HarnessError(
                f"{policy}: {play.late_share:.1%} of the passes took the machine longer than "
                f"their pace allows at a dilation of {self.dilation:g}; stop what else runs, or "
                f"name a larger --dilation"
            )
        if self._sidecar_child is not None:
            self._sidecar_child.check()
        return play

    def stop(self) -> None:
        """Asks all engines to end at once; the context waits for each."""
        for engine in self._engines.values():
            engine.child.terminate()

    def _run_side_by_side(
        self, jobs: Mapping[str, Callable[[], StreamPlay]]
    ) -> dict[str, StreamPlay]:
        pool = ThreadPoolExecutor(_SIDE_BY_SIDE)
        try:
            running = {name: pool.submit(job) for name, job in jobs.items()}
            return {name: job.result() for name, job in running.items()}
        finally:
            # After an error or a signal the other jobs are abandoned: their engines are ended.
            pool.shutdown(wait=False, cancel_futures=True)

    def _kinds(self) -> tuple[str, ...]:
        return tuple(self.setting.pace.curves or ("",))

    def _write_dilation(self) -> None:
        write_atomically(self._dilation_file, f"{self.dilation:g}".encode())


def _needed_dilation(steps: Sequence[LoggedStep]) -> float:
    """Returns the machine's own work in a step over its imposed time, at the 95th percentile."""
    return float(np.percentile([step.used_seconds / step.seconds for step in steps], 95))
