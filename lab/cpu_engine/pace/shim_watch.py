"""Watches from outside what the plugin does in a step, because the plugin is not asked.

The classes are those of the plugin, if the engine has it; they are wrapped before they are used.
"""

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

_SLEEPING = "engine_shim.sglang.drafters.sleeping_drafter"
_DUAL = "engine_shim.sglang.drafters.dual"
_ROWS = "engine_shim.sglang.drafters.row_drafting"
_HOOKS = "engine_shim.sglang.hooks"
# Methods of EngineHooks that are given the method of SGLang's that they wrap.
_AROUND = ("around_forward", "around_draft", "around_draft_extend", "around_resolve")


def draft_length(scheduler: Any, result: Any) -> int | None:
    """Returns the draft length of a decode step; None for an engine that cannot speculate."""
    width = getattr(result, "speculative_num_draft_tokens", None)
    return int(width) - 1 if scheduler.draft_worker is not None and width else None


def steering_of(result: Any) -> dict[str, Any]:
    """Returns how a decode step was chosen, as LoggedStep has it: probe, epoch, steered."""
    launch = getattr(result, "speculation_launch", None)
    choice = None if launch is None else launch.choice
    return {
        "probe": 0 if choice is None else choice.probe_id,
        "epoch": 0 if choice is None else choice.epoch,
        "steered": choice is not None and choice.source.value == "plan",
    }


class ShimWatch:
    """Counts of the step that runs; `begin` clears them.

    block_drafted: the second drafter drafted.  lookup_drafted: the lookup did, alone.  look_up:
    it searched.  mixed: rows chose between it and another drafter.  asleep: the draft-extend was
    left out.  caught_up: positions that a drafter read late.
    """

    def __init__(self) -> None:
        self.block_drafted = self.lookup_drafted = self.looked_up = self.mixed = False
        self.asleep = self.has_second = False
        self.caught_up = 0
        self._seconds = 0.0
        self._wrapped_modules: set[str] = set()

    def begin(self) -> None:
        """Clears what the step before has left, and wraps what has been imported since."""
        self.block_drafted = self.lookup_drafted = self.looked_up = False
        self.mixed = self.asleep = False
        self.caught_up = 0
        wraps = (
            (_SLEEPING, self._wrap_sleeping_drafter),
            (_DUAL, self._wrap_dual),
            (_ROWS, self._wrap_rows),
        )
        for name, wrap in wraps:
            module = sys.modules.get(name)
            if module is not None and name not in self._wrapped_modules:
                self._wrapped_modules.add(name)
                wrap(module)

    def take_seconds(self) -> float:
        """Seconds of the hooks' own work since this was last asked; a step is reported in the next.

        On the machine's clock: a dilation does not lengthen it.
        """
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def wrap_hooks(self) -> None:
        """Times the hooks; to be called before the engine's workers are built."""
        if _HOOKS in self._wrapped_modules:
            return
        self._wrapped_modules.add(_HOOKS)
        from engine_shim.sglang.hooks import EngineHooks

        for name in _AROUND:
            setattr(EngineHooks, name, self._timed(getattr(EngineHooks, name)))
        for name in ("add_rank_updates", "after_process_result"):
            setattr(EngineHooks, name, self._timed_after(getattr(EngineHooks, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(hooks: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            inner = 0.0

            def wrapped(*inner_args: Any, **inner_kwargs: Any) -> Any:
                nonlocal inner
                inner_start = perf_counter()
                try:
                    return original(*inner_args, **inner_kwargs)
                finally:
                    inner += perf_counter() - inner_start

            start = perf_counter()
            result = hook(hooks, wrapped, *args, **kwargs)
            self._seconds += perf_counter() - start - inner
            return result

        return timed

    def _timed_after(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = perf_counter()
            result = hook(*args)
            self._seconds += perf_counter() - start
            return result

        return timed

    def _exclude_time(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps what is priced, and not the hooks' own work, though it runs inside of them."""

        def excluded(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = function(*args, **kwargs)
            self._seconds -= perf_counter() - start
            return result

        return excluded

    def _wrap_sleeping_drafter(self, module: Any) -> None:
        kind = module.SleepingDrafter
        before_step, sleep_through = kind.before_step, kind.sleep_through

        def count_caught_up(drafter: Any, *args: Any, **kwargs: Any) -> None:
            start, caught_up_before = perf_counter(), drafter.counters.caught_up
            before_step(drafter, *args, **kwargs)
            read = drafter.counters.caught_up - caught_up_before
            self.caught_up += read
            if read:
                # A pass of the drafter: it is priced, and not the hooks' own work.
                self._seconds -= perf_counter() - start

        def note_sleep(drafter: Any, *args: Any, **kwargs: Any) -> None:
            sleep_through(drafter, *args, **kwargs)
            self.asleep = True

        kind.before_step, kind.sleep_through = count_caught_up, note_sleep

    def _wrap_dual(self, module: Any) -> None:
        kind = module.DualDrafter
        draft, follow = self._exclude_time(kind.draft), self._exclude_time(kind.follow)

        def note_block_draft(dual: Any, *args: Any, **kwargs: Any) -> Any:
            chain = draft(dual, *args, **kwargs)
            self.block_drafted = chain is not None
            return chain

        def note_second_drafter(dual: Any, *args: Any, **kwargs: Any) -> Any:
            self.has_second = True
            return follow(dual, *args, **kwargs)

        kind.draft, kind.follow = note_block_draft, note_second_drafter

    def _wrap_rows(self, module: Any) -> None:
        rows, history, choice = module.RowDrafting, module.TokenHistory, module.RowChoice
        draft_alone, choose = rows.draft_alone, choice.choose
        propose = self._exclude_time(history.propose)

        def note_lookup_draft(kind: Any, *args: Any, **kwargs: Any) -> Any:
            verify = draft_alone(kind, *args, **kwargs)
            self.lookup_drafted = verify is not None
            return verify

        def note_mixed_choice(kind: Any, *args: Any, **kwargs: Any) -> Any:
            tokens, proposed = choose(kind, *args, **kwargs)
            self.mixed = proposed.is_mixed
            return tokens, proposed

        def note_lookup(kind: Any, *args: Any, **kwargs: Any) -> Any:
            self.looked_up = True
            return propose(kind, *args, **kwargs)

        rows.draft_alone, rows.after_verify = (
            note_lookup_draft,
            self._exclude_time(rows.after_verify),
        )
        history.propose, choice.choose = note_lookup, note_mixed_choice
