"""Registers hooks with SGLang, and checks that SGLang applied every one of them.

SGLang logs an error in a hook and continues without it; this plugin refuses to start instead.  The
check runs in two processes: in the configuration step of the launcher, and in the policy's
constructor and the start of the scheduler.  So a missing hook is detected even if the code that it
would run is never called.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from engine_shim.common.errors import HookError

_registered: Final[dict[str, list[tuple[HookType, Callable[..., Any]]]]] = {}


def register_hook(target: str, hook: Callable[..., Any], kind: HookType) -> None:
    """Registers a hook with SGLang and remembers it for `require_hooks`.

    SGLang applies the hooks of a target once, and ignores later ones without a message.  If the
    target is patched already, this hook is therefore wrapped around the applied ones here.  Raises
    HookError for a replacement that comes so late: it would remove the hooks of other plugins.
    """
    is_patched = target in HookRegistry._patched
    if is_patched and kind is HookType.REPLACE:
        raise HookError(f"another plugin hooked {target} before this one could replace it")
    HookRegistry.register(target, hook, kind)
    if is_patched:
        HookRegistry._apply_target(target, [(kind, hook, None)])
    _registered.setdefault(target, []).append((kind, hook))


around: Final = partial(register_hook, kind=HookType.AROUND)
after: Final = partial(register_hook, kind=HookType.AFTER)
replace: Final = partial(register_hook, kind=HookType.REPLACE)


def registered_targets() -> tuple[str, ...]:
    """Returns all targets that this process has hooked, in order."""
    return tuple(_registered)


def require_hooks(*targets: str) -> None:
    """Raises HookError unless each target was patched, and with all of this plugin's hooks."""
    for target in targets:
        if target not in _registered:
            raise HookError(f"the plugin never hooked {target} in this process")
        if target not in HookRegistry._patched:
            raise HookError(
                f"SGLang could not apply the plugin's hook to {target}; its log has the cause, "
                "beginning with 'Failed to apply hooks'"
            )
        in_use = pkgutil.resolve_name(target)
        for kind, hook in _registered[target]:
            if isinstance(hook, type):
                if in_use is not hook:
                    raise HookError(f"{target} is {in_use!r}, not the plugin's {hook.__qualname__}")
            elif not _is_wrapped_by(in_use, hook):
                raise HookError(f"{target} is not wrapped by the plugin's hook")
            if kind is HookType.REPLACE:
                replacing = [h for k, h, _ in HookRegistry._hooks[target] if k is HookType.REPLACE]
                if replacing[-1] != hook:
                    raise HookError(f"another plugin replaced {target} after this one")


def _is_wrapped_by(function: Callable[..., Any], hook: Callable[..., Any]) -> bool:
    """Returns whether one of the wrappers around a function calls the hook.

    SGLang's wrappers have the hook as a closure variable, and the function that they wrap as
    `__wrapped__`.
    """

    def calls_hook(wrapper: Any) -> bool:
        cells = getattr(wrapper, "__closure__", None) or ()
        return any(cell.cell_contents is hook for cell in cells)

    return calls_hook(inspect.unwrap(function, stop=calls_hook))
