"""An SGLang plugin for shim_bench: what the shim's hooks take of each decode step of an engine.

Each hook is timed together with SGLang's wrapping of it.  What it wraps is left out, and so are
the drafters' own passes.  Steps take turns at what is taken of them (WALL and so on), because one
reading disturbs the others.  The records go out with `/server_info`.
"""

import functools
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle
from typing import Any, Final

# What is taken of a step: nanoseconds of its hooks; the same with their inner parts apart; the
# thread's processor time; function calls, Python's and C's; operators that torch dispatches.
WALL: Final = "wall"
PARTS: Final = "parts"
PROCESSOR: Final = "processor"
CALLS: Final = "calls"
OPERATORS: Final = "operators"
TIMERS: Final = "the timers alone"
EMPTY: Final = "an empty hook"
SEND: Final = "a bare send"
POLICY: Final = "SGLang's own policy"
REFERENCES: Final = (TIMERS, EMPTY, SEND, POLICY)
# Taken in PARTS only: what hooks call.
CALLED: Final = ("choose", "receive", "report")

_ENGINE: Final = ""
_VERIFY: Final = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify"
_TURNS: Final = (WALL, PARTS, PROCESSOR) * 6 + (CALLS, OPERATORS)
# As large as a report at gamma 3.
_PACKET: Final = bytes(82)


class Spans:
    """Adds up, for one step at a time, what each span takes without the spans inside it.

    records: one of each step that verified and reported: its kind, the amounts by name (`own`), and
    how often something was left out of them, which takes what TIMERS takes.
    size: sequences of the last step whose result was read; plan: whether a plan was taken since.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._amounts: defaultdict[str, int] = defaultdict(int)
        self._inside = self._left_out = 0
        self._turns = cycle(_TURNS)
        self._kind = WALL
        self._clock: Callable[[], int] = time.perf_counter_ns
        self._counted = 0
        self._mode: Any = None
        self._counts = False
        self.size = 0
        self.plan = False

    def span(self, name: str, function: Callable[..., Any], *, part: bool = False) -> Any:
        """Times a function; part: only in steps of which the inner parts are taken."""

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            if part and self._kind != PARTS:
                return function(*arguments, **named)
            outer, self._inside = self._inside, 0
            counted = self._set_counting(name != _ENGINE)
            self._left_out += counted and name == _ENGINE
            start = self._clock()
            try:
                return function(*arguments, **named)
            finally:
                elapsed = self._clock() - start
                self._set_counting(counted)
                self._amounts[name] += elapsed - self._inside
                self._inside = outer + elapsed

        return timed

    def end_step(self) -> None:
        """Keeps what was added up since the last call, and begins a step of the next kind."""
        amounts, self._amounts = self._amounts, defaultdict(int)
        left_out, self._left_out = self._left_out, 0
        for name in (_ENGINE, "after_internal_state"):
            amounts.pop(name, None)
        if "around_draft_extend" in amounts and "around_resolve" in amounts:
            # One of them was left out of TIMERS or of EMPTY.
            self.records.append({
                "kind": self._kind, "size": self.size, "plan": self.plan,
                "left_out": left_out - 1, "own": amounts,
            })  # fmt: skip
            self.plan = False
            self._kind = next(self._turns)
            clocks = {
                PROCESSOR: time.thread_time_ns,
                CALLS: self._current_count,
                OPERATORS: self._current_count,
            }
            self._clock = clocks.get(self._kind, time.perf_counter_ns)

    def _current_count(self) -> int:
        return self._counted

    def _set_counting(self, enabled: bool) -> bool:
        """Counts calls or operators, in a step of that kind, or stops; whether it did before."""
        was_counting, self._counts = self._counts, enabled
        if was_counting != enabled and self._kind == CALLS:
            sys.setprofile(self._see_call if enabled else None)
        elif was_counting != enabled and self._kind == OPERATORS:
            self._mode = self._mode or _operator_counter(self)
            if enabled:
                self._mode.__enter__()
            else:
                self._mode.__exit__(None, None, None)
        return was_counting

    def _see_call(self, frame: Any, event: str, _: Any) -> None:
        if event in {"call", "c_call"} and frame.f_code.co_filename != __file__:
            self._counted += 1

    def see_operator(self) -> None:
        """Counts one operator."""
        self._counted += 1


def _operator_counter(spans: Spans) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, operator: Any, _: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            spans.see_operator()
            return operator(*arguments, **(named or {}))

    return Mode()


def _empty(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """A hook that does nothing."""
    return original(*arguments, **named)


def time_hooks() -> None:
    """Registers the hooks, as a plugin of SGLang."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins import hook_registry
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    from engine_shim.link.engine_link import EngineLink
    from engine_shim.link.plan_follower import PlanFollower
    from engine_shim.link.rank_plan_sync import RankPlanSync
    from engine_shim.sglang.adaptive_policy import SteeredPolicy
    from engine_shim.sglang.drafters import sleeping_drafter
    from engine_shim.sglang.hooks import EngineHooks

    spans = Spans()
    _time_registered(spans, hook_registry)
    for owner, method in (
        (RankPlanSync, "choose"), (EngineLink, "receive"), (EngineLink, "report"),
    ):  # fmt: skip
        setattr(owner, method, spans.span(method, getattr(owner, method), part=True))
    # SGLang's dispatcher may call it, where no hook is.
    _replace(RankPlanSync, "adopt", lambda adopt: spans.span("adopt", adopt))
    _replace(PlanFollower, "accept", lambda accept: _note_plans(spans, accept))
    _replace(sleeping_drafter, "_read", lambda read: spans.span(_ENGINE, read))

    def register(original: Callable[[EngineHooks], None]) -> Callable[[EngineHooks], None]:
        def registered(hooks: EngineHooks) -> None:
            _leave_out_passes(spans)
            original(hooks)
            hook_registry.HookRegistry.register(_VERIFY, _empty, hook_registry.HookType.AROUND)
            policy = AdaptiveSpeculativeParams(3)

            def decide(accepted: list[int], batch_size: int) -> None:
                spans.size = batch_size
                policy.on_verify_complete(accepted, batch_size)
                policy.get_steps_for_batch(batch_size)

            decide_in_span = spans.span(POLICY, decide)
            _replace(
                SteeredPolicy, "on_verify_complete",
                lambda _: lambda _, accepted, size: decide_in_span(accepted, size),
            )  # fmt: skip

        return registered

    def status(original: Callable[[EngineHooks], Any]) -> Callable[[EngineHooks], Any]:
        def with_records(hooks: EngineHooks) -> Any:
            records, spans.records = spans.records, []
            return original(hooks) | {"hook_spans": records}

        return with_records

    _replace(EngineHooks, "register", register)
    _replace(EngineHooks, "status", status)


def _time_registered(spans: Spans, hook_registry: Any) -> None:
    """Has every hook of the shim timed as SGLang applies it; a step begins at `around_forward`."""
    original_wrap = hook_registry._wrap_fn
    local_socket, peer_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    send = spans.span(SEND, local_socket.send)

    def between_steps(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def called(*arguments: Any, **named: Any) -> Any:
            send(_PACKET, socket.MSG_DONTWAIT)
            peer_socket.recv(4096)
            spans.end_step()
            return forward(*arguments, **named)

        return called

    def wrap(original: Any, hook: Any, kind: Any) -> Any:
        if getattr(hook, "__module__", "").partition(".")[0] not in {"engine_shim", "tools"}:
            return original_wrap(original, hook, kind)
        inner = spans.span(_ENGINE, original)
        wrapped = original_wrap(inner, hook, kind)
        if hook is _empty:
            return _alternate(spans.span(TIMERS, inner), spans.span(EMPTY, wrapped))
        timed = spans.span(hook.__name__, wrapped)
        return between_steps(timed) if hook.__name__ == "around_forward" else timed

    hook_registry._wrap_fn = wrap


def _note_plans(spans: Spans, accept: Callable[..., bool]) -> Callable[..., bool]:
    def noted(*arguments: Any) -> bool:
        spans.plan = True
        return accept(*arguments)

    return noted


def _alternate(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    ways = cycle((first, second))

    @functools.wraps(first)
    def called(*arguments: Any, **named: Any) -> Any:
        return next(ways)(*arguments, **named)

    return called


def _leave_out_passes(spans: Spans) -> None:
    """Takes the passes of a second drafter, and SGLang's own stub, for the engine's work."""
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    from engine_shim.sglang.drafters.dflash import DFlashDrafter

    for owner, method in (
        (EAGLEWorkerV2, "_stub_skipped_draft_extend"),
        (DFlashDrafter, "draft"), (DFlashDrafter, "chain"), (DFlashDrafter, "read"),
    ):  # fmt: skip
        _replace(owner, method, lambda method: spans.span(_ENGINE, method))


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))
