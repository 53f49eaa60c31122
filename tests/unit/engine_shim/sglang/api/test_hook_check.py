"""A hook that did not take is found, whatever SGLang made of it."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

# SGLang's own registry: the test fails when it changes its ways.
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from engine_shim.common.errors import HookError
from engine_shim.sglang.api import hook_check

MODULE = "hooked_for_a_test"


class Original:
    def method(self) -> str:
        return "original"


class Replacement:
    pass


@pytest.fixture(autouse=True)
def clean_registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = types.ModuleType(MODULE)
    vars(module).update(function=lambda: "original", Original=Original, Plain=type("Plain", (), {}))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(hook_check, "_registered", {})
    method = Original.method
    HookRegistry.reset()
    yield
    HookRegistry.reset()
    Original.method = method  # type: ignore[method-assign]


def around(original: Any, *args: Any) -> Any:
    return f"around {original(*args)}"


def test_hooks_that_took_pass() -> None:
    hook_check.register_hook(f"{MODULE}.function", around, HookType.AROUND)
    hook_check.register_hook(f"{MODULE}.Original.method", around, HookType.AROUND)
    hook_check.register_hook(f"{MODULE}.Plain", Replacement, HookType.REPLACE)
    HookRegistry.apply_hooks()
    hook_check.require_hooks(*hook_check.registered_targets())
    assert sys.modules[MODULE].function() == "around original"


@pytest.mark.parametrize("target", ["Original.renamed", "gone", "Original.method.deeper.still"])
def test_a_target_that_is_not_there_is_refused(target: str) -> None:
    hook_check.register_hook(f"{MODULE}.{target}", around, HookType.AROUND)
    HookRegistry.apply_hooks()  # SGLang logs the error and continues
    with pytest.raises(HookError, match=target):
        hook_check.require_hooks(*hook_check.registered_targets())


def test_hooks_that_were_never_applied_are_refused() -> None:
    hook_check.register_hook(f"{MODULE}.function", around, HookType.AROUND)
    with pytest.raises(HookError, match="could not apply"):
        hook_check.require_hooks(f"{MODULE}.function")


def test_hooks_that_were_never_registered_are_refused() -> None:
    with pytest.raises(HookError, match="never hooked"):
        hook_check.require_hooks(f"{MODULE}.function")


def test_a_hook_that_something_else_undid_is_refused() -> None:
    hook_check.register_hook(f"{MODULE}.function", around, HookType.AROUND)
    hook_check.register_hook(f"{MODULE}.Plain", Replacement, HookType.REPLACE)
    HookRegistry.apply_hooks()
    vars(sys.modules[MODULE])["Plain"] = type("Plain", (), {})
    with pytest.raises(HookError, match="Plain"):
        hook_check.require_hooks(f"{MODULE}.Plain")
    vars(sys.modules[MODULE])["function"] = lambda: "fresh"
    with pytest.raises(HookError, match="not wrapped"):
        hook_check.require_hooks(f"{MODULE}.function")


def test_a_hook_that_was_ignored_is_refused_though_another_plugins_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    HookRegistry.register(f"{MODULE}.function", lambda result: result, HookType.AFTER)
    HookRegistry.apply_hooks()
    monkeypatch.setattr(HookRegistry, "_apply_target", lambda *_: None)
    hook_check.around(f"{MODULE}.function", around)
    with pytest.raises(HookError, match="not wrapped by the plugin's hook"):
        hook_check.require_hooks(f"{MODULE}.function")


def test_each_of_several_hooks_of_one_target_is_required() -> None:
    hook_check.after(f"{MODULE}.function", lambda result: result)
    HookRegistry.apply_hooks()
    applied = sys.modules[MODULE].function
    hook_check.around(f"{MODULE}.function", around)
    hook_check.require_hooks(f"{MODULE}.function")
    vars(sys.modules[MODULE])["function"] = applied
    with pytest.raises(HookError, match="not wrapped by the plugin's hook"):
        hook_check.require_hooks(f"{MODULE}.function")


def test_a_replacement_that_another_plugin_overrode_is_refused() -> None:
    hook_check.register_hook(f"{MODULE}.function", lambda: "ours", HookType.REPLACE)
    HookRegistry.register(f"{MODULE}.function", lambda: "theirs", HookType.REPLACE)
    HookRegistry.apply_hooks()
    with pytest.raises(HookError, match="another plugin"):
        hook_check.require_hooks(f"{MODULE}.function")


def test_a_hook_is_applied_though_another_plugins_were_applied_before() -> None:
    for target in ("function", "Original.method"):
        HookRegistry.register(f"{MODULE}.{target}", around, HookType.AROUND)
    HookRegistry.apply_hooks()
    seen: list[str] = []
    for target in ("function", "Original.method"):
        hook_check.after(f"{MODULE}.{target}", lambda result, *_: seen.append(result))
    HookRegistry.apply_hooks()
    hook_check.require_hooks(*hook_check.registered_targets())
    assert sys.modules[MODULE].function() == "around original"
    assert Original().method() == "around original"
    assert seen == ["around original"] * 2


def test_a_replacement_that_comes_after_another_plugins_hooks_is_refused() -> None:
    HookRegistry.register(f"{MODULE}.function", around, HookType.AROUND)
    HookRegistry.apply_hooks()
    with pytest.raises(HookError, match="another plugin hooked"):
        hook_check.replace(f"{MODULE}.function", lambda: "ours")
