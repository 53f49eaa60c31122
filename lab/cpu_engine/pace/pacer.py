"""Holds every pass of the real SGLang until the time that a cost model gives it has passed.

`Scheduler.run_batch` is wrapped.  A pass that follows another without idling begins when that one
was due, so what the scheduler does between two passes is inside the pace: as it is on a GPU, where
the published step times were measured end to end.  A pass that took the CPU longer than its pace is
late, is counted, and the next one begins when it has really ended.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace import dummy_layers
from lab.cpu_engine.pace.acceptance import DrawnAcceptance, RequestId, accept
from lab.cpu_engine.pace.shim_watch import ShimWatch
from lab.cpu_engine.pace.step_costs import OWN, SECOND, StepCosts, load_step_costs
from lab.cpu_engine.pace.step_log import PacedRequest, PacedStep, StepLog

VARIABLE = "LAB_PACE"
# The last moments of a wait are spent awake, because a sleep ends late.
_AWAKE_SECONDS = 2e-4
# A pass that was let go this much of its pace after it was due is late too.
_LATE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Pace:
    """How an engine is paced, as it stands in the variable LAB_PACE (JSON).

    table: as `load_step_costs` takes it.  dilation: seconds of the machine for each of the model;
    a number in the file dilation_file, read whenever the engine has been idle, counts instead.
    log: where its passes are written; none are if it is empty.  gammas: the engine's draft lengths.
    seed, curves: of the drawn acceptance (class -> drafter -> conditional acceptance); without
    curves, the models' own acceptance stands.
    """

    table: str
    dilation: float
    log: str = ""
    gammas: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    max_batch_size: int = 256
    seed: int = 0
    curves: Mapping[str, Mapping[str, Sequence[float]]] | None = None
    dilation_file: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.dilation < float("inf"):
            raise ValueError(f"a dilation is a number above 0, not {self.dilation}")

    def as_json(self) -> str:
        """The variable's value."""
        return TypeAdapter(Pace).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Pace":
        """Reads the variable.  Raises ValueError."""
        return TypeAdapter(Pace).validate_json(text)

    def costs(self) -> StepCosts:
        """The costs that are imposed.  Raises InvalidInputError."""
        return load_step_costs(self.table, self.gammas, self.max_batch_size)


def register() -> None:
    """Installs the pace in an engine's scheduler; SGLang calls this as an entry point."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    pacer = Pacer(Pace.from_json(text))
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.run_batch", pacer.around_run_batch, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.on_idle", pacer.around_idle, HookType.AROUND)
    if os.environ.get("SPECULATION_SIDECAR"):
        pacer.watch.wrap_hooks()
    if pacer.drawn is not None:
        from sglang.srt.speculative import spec_utils

        # Any length above 0 has SGLang ask; the answer is drawn.
        spec_utils.SIMULATE_ACC_LEN = 1.0
        spec_utils.generate_simulated_accept_index = pacer.accept
        dummy_layers.leave_out()


class Pacer:
    """The pace of one engine, in its scheduler's process.

    drawn: where acceptance comes from; None if the models' own stands.
    """

    def __init__(self, pace: Pace) -> None:
        self._dilation = pace.dilation
        self._dilation_file = Path(pace.dilation_file) if pace.dilation_file else None
        self._costs = pace.costs()
        self._log = StepLog(Path(pace.log)) if pace.log else None
        self.drawn = None if pace.curves is None else DrawnAcceptance(pace.curves, pace.seed)
        self.watch = ShimWatch()
        self._requests: Sequence[Any] = ()
        self._first_tokens: dict[str, float] = {}
        self._last_arm: tuple[Arm, bool] | None = None
        # When the next pass begins, unless the engine has been idle: None.
        self._begin: float | None = None

    def around_idle(self, original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
        """Wraps `Scheduler.on_idle`: the next pass begins when it is launched."""
        self._finish()
        self._begin = None
        if self._log is not None:
            self._log.flush()
        return original(scheduler, *args)

    def around_run_batch(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wraps `Scheduler.run_batch`; returns when the pass is due."""
        launched = time.perf_counter()
        self._finish()
        if batch.forward_mode.is_idle() or batch.forward_mode.is_prebuilt():
            return original(scheduler, batch, *args, **kwargs)
        if self._begin is None and self._dilation_file is not None:
            self._dilation = float(self._dilation_file.read_text(encoding="utf-8"))
        began = launched if self._begin is None else self._begin
        # A copy: SGLang takes what has ended out of its own list.
        self._requests = list(batch.reqs)
        self.watch.begin()
        kv_tokens = sum([len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs])
        result = original(scheduler, batch, *args, **kwargs)
        step = self._price(scheduler, batch, result, kv_tokens)
        due = began + step["seconds"] * self._dilation
        worked = time.perf_counter()
        ended = worked if worked >= due else _wait_until(due)
        late = ended - due > _LATE_SHARE * (due - began) or worked > due
        self._begin = ended if late else due
        if batch.forward_mode.is_extend():
            for request in batch.reqs:
                self._first_tokens[request.rid] = self._begin
        if self._log is not None:
            self._log.add(
                PacedStep(
                    began=began,
                    launched=launched,
                    ended=self._begin,
                    due=due,
                    late=late,
                    batch_size=len(batch.reqs),
                    kv_tokens=kv_tokens,
                    kinds=_kinds(batch.reqs),
                    used_seconds=worked - launched,
                    shim_seconds=self.watch.take_seconds(),
                    **step,
                )
            )
        return result

    def accept(
        self, accept_index: Any, predict: Any, num_correct_drafts: Any, spec_steps: int, **_: Any
    ) -> Any:
        """Replaces SGLang's `spec_utils.generate_simulated_accept_index`."""
        drawn = self.drawn
        assert drawn is not None
        drafter = SECOND if self.watch.block_drafted else OWN
        lengths = [drawn.at(r.rid, drafter, len(r.output_ids) - 1) for r in self._requests]
        return accept(accept_index, predict, num_correct_drafts, lengths, spec_steps)

    def _price(self, scheduler: Any, batch: Any, result: Any, kv_tokens: int) -> dict[str, Any]:
        """The imposed seconds of a pass, and what they were made from."""
        costs, watch, size = self._costs, self.watch, len(batch.reqs)
        if batch.forward_mode.is_extend():
            tokens = int(batch.extend_num_tokens or 0)
            return {"seconds": costs.prefill_seconds(tokens), "tokens": tokens}
        width = getattr(result, "speculative_num_draft_tokens", None)
        speculates = scheduler.draft_worker is not None and width
        gamma = int(width) - 1 if speculates and width else 0
        drafter = SECOND if watch.block_drafted else OWN
        arm = Arm(drafter if gamma else OWN, gamma)
        accepted = int(result.accept_lens.sum()) - size if speculates else 0
        warm = bool(speculates) and not watch.asleep
        seconds = costs.decode_seconds(arm, size, kv_tokens, warm=warm)
        ran = (arm, watch.asleep)
        switched = self._last_arm is not None and ran != self._last_arm
        self._last_arm = ran
        switch = costs.switch_seconds if switched else 0.0
        catch_up = costs.catch_up_seconds(watch.caught_up)
        if watch.has_second and not watch.asleep:
            # The drafter that did not draft reads what was accepted.
            catch_up += costs.surface.catch_up_seconds_per_token * (size + accepted)
        launch = getattr(result, "speculation_launch", None)
        choice = None if launch is None else launch.choice
        return {
            "seconds": seconds + switch + catch_up,
            "drafter": drafter if speculates else "",
            "gamma": gamma,
            "asleep": watch.asleep,
            "accepted": accepted,
            "tokens": size + accepted,
            "switch_seconds": switch,
            "catch_up_seconds": catch_up,
            "probe": 0 if choice is None else choice.probe_id,
            "epoch": 0 if choice is None else choice.epoch,
            "steered": choice is not None and choice.source.value == "plan",
        }

    def _finish(self) -> None:
        """Notes the requests that ended with the last pass."""
        for request in self._requests:
            if not request.finished():
                continue
            first = self._first_tokens.pop(request.rid, None)
            if self.drawn is not None:
                self.drawn.forget(request.rid)
            if self._log is not None and first is not None and self._begin is not None:
                tokens = len(request.output_ids)
                self._log.add(PacedRequest(request.rid, first, self._begin, tokens))
        self._requests = ()


def _wait_until(due: float) -> float:
    """Sleeps until then; returns the time."""
    left = due - time.perf_counter()
    if left > _AWAKE_SECONDS:
        time.sleep(left - _AWAKE_SECONDS)
    while (now := time.perf_counter()) < due:
        pass
    return now


def _kinds(requests: Sequence[Any]) -> dict[str, int]:
    parsed = [RequestId.parse(request.rid) for request in requests]
    return dict(Counter("" if found is None else found.kind for found in parsed))
