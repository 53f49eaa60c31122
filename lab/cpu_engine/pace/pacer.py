"""Holds every pass of the real SGLang until the time that a cost table gives it has passed.

`Scheduler.run_batch` is wrapped.  A pass that follows another without idling begins when that one
was due, so what the scheduler does between two passes is inside the pace: as it is on a GPU, where
the published step times were measured end to end.  A pass that took the CPU longer than its pace is
late, is counted, and the next one begins when it has really ended.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from controller.core.engine_spec import Arm
from lab.cpu_engine.environment import PACE_VARIABLE
from lab.cpu_engine.pace.acceptance import DrawnAcceptance, RequestId, accept, leave_out_layers
from lab.cpu_engine.pace.model_clock import ModelClock
from lab.cpu_engine.pace.shim_watch import ShimWatch, draft_length, steering_of
from lab.cpu_engine.pace.step_costs import (
    LOOKUP,
    OWN,
    SECOND,
    StepCosts,
    load_step_costs,
)
from lab.cpu_engine.pace.step_log import LoggedRequest, LoggedStep, StepLog
from lab.cpu_engine.pace.updates import UpdateCosts, UpdateWatch
from simulator.errors import InvalidInputError

VARIABLE = PACE_VARIABLE
# A pass that ends later than due by this share of its duration is late too.  The next one makes up
# for a smaller delay, since it begins when this one was due.
_LATE_SHARE = 0.25
_SECOND_MODEL = "SPECULATION_DFLASH_MODEL_PATH"
_LOOKUP = "SPECULATION_LOOKUP"
# What this module notes on a request of SGLang's.
_FIRST_OUTPUT_ATTRIBUTE = "paced_first_token"

_log = logging.getLogger(__name__)
# Chains of drafts by serial passes, by the names that SGLang has for them.
_CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


@dataclass(frozen=True, slots=True)
class Pace:
    """Describes how an engine is paced; the variable LAB_PACE holds it as JSON.

    table: as `load_step_costs` takes it.  dilation: seconds of the machine for each of the model;
    a number in the file dilation_file, read whenever the engine has been idle, counts instead.
    log: the file to which its passes are appended; "" for none.  gammas: the engine's draft
    lengths; () for all that the table has.  max_batch_size: the most sequences that are priced.
    curves: of the drawn acceptance (class -> drafter -> conditional acceptance); None: the models'
    own acceptance stands.  updates: what online updates cost; None: what they take on this machine.
    held: passes wait until they are due.  Otherwise nothing waits: what the engine reports is still
    the model's time, and no pass is late, but only the log's seconds say how long a stream took.

    Raises ValueError for a dilation that is not a finite number above 0.
    """

    table: str
    dilation: float
    log: str = ""
    gammas: tuple[int, ...] = ()
    max_batch_size: int = 256
    curves: Mapping[str, Mapping[str, Sequence[float]]] | None = None
    dilation_file: str = ""
    lookup: bool = False
    updates: UpdateCosts | None = None
    held: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.dilation < math.inf:
            raise ValueError(f"a dilation is a number above 0, not {self.dilation}")

    def as_json(self) -> str:
        """The variable's value."""
        return TypeAdapter(Pace).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Pace":
        """Reads the variable.  Raises ValueError."""
        return TypeAdapter(Pace).validate_json(text)

    def costs(self) -> StepCosts:
        """Loads the costs that are imposed.  Raises InvalidInputError."""
        return load_step_costs(self.table, self.gammas, self.max_batch_size, lookup=self.lookup)


def register() -> None:
    """Installs the pace in an engine; SGLang calls this as an entry point.

    Ends the process where the pace cannot be held: SGLang would only log an exception, and the
    engine would run without a pace.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import spec_utils

    second = bool(os.environ.get(_SECOND_MODEL))
    lookup = os.environ.get(_LOOKUP, "") not in ("", "0", "false")
    try:
        pace = Pace.from_json(text)
        pacer = Pacer(pace)
        if pacer.drawn_acceptance is not None:
            pacer.drawn_acceptance.require([OWN, SECOND] if second else [OWN])
            # Any length above 0 has SGLang ask; the answer is drawn.
            spec_utils.SIMULATE_ACC_LEN = 1.0
            spec_utils.generate_simulated_accept_index = pacer.accept
            leave_out_layers()
    except (InvalidInputError, ValueError, OSError) as error:
        raise SystemExit(f"{VARIABLE}: {error}") from error
    costs = pace.costs()

    def check(_: None, args: Any) -> None:
        reason = unsupported_reason(args, costs, second=second, lookup=lookup)
        if reason is not None:
            raise SystemExit(f"{VARIABLE}: this engine cannot be paced: {reason}")

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    resolved = "sglang.srt.server_args.ServerArgs.resolve_once"
    HookRegistry.register(f"{scheduler}.run_batch", pacer.around_run_batch, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.on_idle", pacer.around_idle, HookType.AROUND)
    HookRegistry.register(resolved, check, HookType.AFTER)
    if os.environ.get("SPECULATION_SIDECAR"):
        pacer.watch.wrap_hooks()
        pacer.updates.wrap_shim()


class Pacer:
    """Holds the passes of one engine, in its scheduler's process.

    drawn_acceptance: where acceptance comes from; None if the models' own stands.  Raises
    InvalidInputError for a table that cannot be used, OSError or ValueError for a log that cannot
    be written and a dilation that cannot be read.
    """

    def __init__(self, pace: Pace) -> None:
        self._dilation = pace.dilation
        self._dilation_file = Path(pace.dilation_file) if pace.dilation_file else None
        if self._dilation_file is not None:
            self._dilation = _read_dilation(self._dilation_file)
        self._costs = pace.costs()
        self._log = StepLog(Path(pace.log)) if pace.log else None
        self.drawn_acceptance = None if pace.curves is None else DrawnAcceptance(pace.curves)
        self.watch = ShimWatch()
        self._clock = ModelClock(real_time=pace.held)
        self.updates = UpdateWatch(pace.updates, self._clock)
        self._requests: Sequence[Any] = ()
        self._last_arm: tuple[Arm, bool] | None = None
        # When the next pass begins, unless the engine has been idle: None.
        self._begin: float | None = None
        self._ended = 0.0

    def around_idle(self, original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
        """Has the next pass begin when it is launched (wraps `Scheduler.on_idle`)."""
        self._finish()
        self._begin = None
        if self._log is not None:
            self._log.flush()
        return original(scheduler, *args)

    def around_run_batch(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wraps `Scheduler.run_batch`, and returns when the pass is due."""
        launched = self._clock.now()
        self._finish()
        if self._begin is None:
            self._adopt_dilation()
        pass_start = launched if self._begin is None else self._begin
        # A copy: SGLang takes what has ended out of its own list.
        self._requests = list(batch.reqs)
        self.watch.begin()
        self.updates.begin((pass_start - self._ended) / self._dilation)
        kv_tokens = sum([len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs])
        remaining_tokens = [
            r.sampling_params.max_new_tokens - len(r.output_ids) for r in batch.reqs
        ]
        result = original(scheduler, batch, *args, **kwargs)
        step = self._price(scheduler, batch, result, kv_tokens, remaining_tokens)
        update_seconds = self.updates.end(step["seconds"], self._dilation)
        step["seconds"] += update_seconds
        due = pass_start + step["seconds"] * self._dilation
        work_end = self._clock.now()
        ended = self._clock.wait_until(due)
        late = ended - due > _LATE_SHARE * (due - pass_start) or work_end > due
        self._begin = self._ended = ended if late else due
        if batch.forward_mode.is_extend():
            for request in batch.reqs:
                # A chunk of a prompt gives no token; a request that was retracted has had its own.
                if request.inflight_middle_chunks <= 0 and not hasattr(
                    request, _FIRST_OUTPUT_ATTRIBUTE
                ):
                    setattr(request, _FIRST_OUTPUT_ATTRIBUTE, self._begin)
        if self._log is not None:
            self._log.add(
                LoggedStep(
                    began=pass_start,
                    launched=launched,
                    ended=self._begin,
                    due=due,
                    late=late,
                    batch_size=len(batch.reqs),
                    kv_tokens=kv_tokens,
                    kinds=_kinds(batch.reqs),
                    used_seconds=work_end - launched,
                    shim_seconds=self.watch.take_seconds(),
                    update_seconds=update_seconds,
                    updates=self.updates.landed,
                    **step,
                )
            )
        return result

    def accept(
        self, accept_index: Any, predict: Any, num_correct_drafts: Any, spec_steps: int, **_: Any
    ) -> Any:
        """Replaces SGLang's `spec_utils.generate_simulated_accept_index`."""
        acceptance = self.drawn_acceptance
        assert acceptance is not None
        drafter = SECOND if self.watch.block_drafted else OWN
        lengths = [
            acceptance.accepted_at(r.rid, drafter, len(r.output_ids) - 1) for r in self._requests
        ]
        return accept(accept_index, predict, num_correct_drafts, lengths, spec_steps)

    def _adopt_dilation(self) -> None:
        """Reads the dilation again; where that fails, the last one stays."""
        if self._dilation_file is None:
            return
        try:
            self._dilation = _read_dilation(self._dilation_file)
        except (OSError, ValueError) as error:
            _log.error("the dilation stays at %g: %s", self._dilation, error)

    def _price(
        self,
        scheduler: Any,
        batch: Any,
        result: Any,
        kv_tokens: int,
        remaining_tokens: Sequence[int],
    ) -> dict[str, Any]:
        """Returns the imposed seconds of a pass, and what they were made from.

        remaining_tokens: [sequences] tokens that each may still gain.
        """
        costs, watch, size = self._costs, self.watch, len(batch.reqs)
        if batch.forward_mode.is_extend():
            tokens = int(batch.extend_num_tokens or 0)
            return {"seconds": costs.prefill_seconds(tokens), "tokens": tokens}
        drafts = draft_length(scheduler, result)
        speculates, gamma = drafts is not None, drafts or 0
        drafter = SECOND if watch.block_drafted else LOOKUP if watch.lookup_drafted else OWN
        arm = Arm(drafter if gamma else OWN, gamma)
        gains = result.accept_lens.tolist() if speculates else [1] * size
        accepted = sum(gains) - size
        warm = speculates and not watch.asleep
        seconds = costs.decode_seconds(arm, size, kv_tokens, warm=warm)
        executed_arm = (arm, watch.asleep)
        switched = self._last_arm is not None and executed_arm != self._last_arm
        self._last_arm = executed_arm
        switch = costs.switch_seconds if switched else 0.0
        catch_up = costs.catch_up_seconds(watch.caught_up)
        if watch.has_second and not watch.asleep:
            # The drafter that did not draft reads what was accepted.
            catch_up += costs.surface.catch_up_seconds_per_token * (size + accepted)
        lookup = 0.0
        if watch.lookup_drafted and not watch.asleep:
            catch_up += costs.reading_seconds(size + accepted)
        elif watch.looked_up and not watch.lookup_drafted:
            longest = max(len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs)
            lookup = costs.lookup_seconds(size * longest)
        return {
            "seconds": seconds + switch + catch_up + lookup,
            "drafter": drafter if speculates else "",
            "gamma": gamma,
            "asleep": watch.asleep,
            "mixed": watch.mixed,
            "accepted": accepted,
            "tokens": sum(map(min, gains, remaining_tokens)),
            "switch_seconds": switch,
            "catch_up_seconds": catch_up,
            "lookup_seconds": lookup,
            **steering_of(result),
        }

    def _finish(self) -> None:
        """Notes the requests that ended with the last pass."""
        for request in self._requests:
            if not request.finished():
                continue
            if self.drawn_acceptance is not None:
                self.drawn_acceptance.forget(request.rid)
            first = getattr(request, _FIRST_OUTPUT_ATTRIBUTE, None)
            if self._log is not None and first is not None and self._begin is not None:
                tokens = len(request.output_ids_through_stop)
                self._log.add(LoggedRequest(request.rid, first, self._begin, tokens))
        self._requests = ()


def _read_dilation(path: Path) -> float:
    """Reads the number in a file.  Raises OSError; ValueError unless it is finite and above 0."""
    text = path.read_text(encoding="utf-8").strip()
    try:
        dilation = float(text)
    except ValueError:
        dilation = math.nan
    if not 0 < dilation < math.inf:
        raise ValueError(f"{path}: a dilation is a number above 0, not {text[:40]!r}")
    return dilation


def _kinds(requests: Sequence[Any]) -> dict[str, int]:
    parsed = [RequestId.parse(request.rid) for request in requests]
    return dict(Counter("" if request_id is None else request_id.kind for request_id in parsed))


def unsupported_reason(
    args: Any, costs: StepCosts, *, second: bool, lookup: bool = False
) -> str | None:
    """Explains why an engine with these arguments cannot be paced; None when it can.

    args: SGLang's, resolved.  second: a DFlash drafter is loaded beside the engine's own.  lookup:
    a prompt lookup drafts beside it.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    view: Any = resolved_view(args)
    ranks = view.tp_size * view.pp_size * view.dp_size
    algorithm = view.speculative_algorithm
    obstacles = {
        f"it has {ranks} ranks, and only one scheduler can be held": ranks != 1,
        f"--disaggregation-mode {view.disaggregation_mode} is not supported": (
            view.disaggregation_mode != "null"
        ),
        "the overlap schedule begins a step before the last one's tokens are known; it needs "
        "--disable-overlap-schedule, and no CPU_ENGINE_OVERLAP": (
            not view.disable_overlap_schedule or os.environ.get("CPU_ENGINE_OVERLAP") == "1"
        ),
        f"--speculative-algorithm {algorithm} has no price": (
            algorithm is not None and algorithm not in _CHAINS
        ),
        f"--speculative-eagle-topk {view.speculative_eagle_topk} drafts trees, and only chains "
        "have a price": algorithm is not None and view.speculative_eagle_topk != 1,
        f"--max-running-requests {view.max_running_requests} exceeds the {_max_batch_size(costs)} "
        "sequences that are priced": (view.max_running_requests or 0) > _max_batch_size(costs),
    }
    obstacle = next((reason for reason, applies in obstacles.items() if applies), None)
    return obstacle or _missing_price(view, costs, second, lookup)


def _missing_price(view: Any, costs: StepCosts, second: bool, lookup: bool) -> str | None:
    priced = set(costs.surface.arms)
    missing = [gamma for gamma in _draft_lengths(view) if Arm(OWN, gamma) not in priced]
    if missing:
        return f"{costs.name} has no price for the draft lengths {missing}"
    if second and not any(arm.drafter == SECOND for arm in priced):
        return f"{costs.name} has no price for a second drafter (SPECULATION_DFLASH_MODEL_PATH)"
    if lookup and not any(arm.drafter == LOOKUP for arm in priced):
        return f"{costs.name} was loaded without a prompt lookup's price (SPECULATION_LOOKUP)"
    return None


def _draft_lengths(view: Any) -> list[int]:
    """The lengths that the engine prepares; the plugin answers for SGLang's adaptive mode."""
    if view.speculative_algorithm is None:
        return [0]
    if view.speculative_adaptive:
        from sglang.srt.speculative import adaptive_spec_params

        path = view.speculative_adaptive_config
        return list(adaptive_spec_params.resolve_candidate_steps_from_config(path))
    return [int(view.speculative_num_draft_tokens) - 1]


def _max_batch_size(costs: StepCosts) -> int:
    return costs.surface.max_batch_size
