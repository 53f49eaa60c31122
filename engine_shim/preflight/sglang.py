"""Tells whether an SGLang with these flags would be steered, with the checks of a real start.

SGLang's own parser and resolution run with the plugin's hooks in place, as in a launcher.  So this
command refuses what a start refuses.  Only configurations are read, no weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from engine_shim.common.checks import Check, checked, protobuf_check
from engine_shim.common.errors import PluginError
from engine_shim.preflight.verdict import (
    SIDECAR,
    Drafter,
    InputError,
    Memory,
    Verdict,
    flags_behind,
    parsing,
    variables_of,
)
from engine_shim.sglang.api import sglang_api, versions
from engine_shim.sglang.plugin import SIDECAR_VARIABLE

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from engine_shim.sglang.api.settings import PluginSettings

_MIB: Final = 2**20
# Launch commands; the flags follow.
_LAUNCHERS: Final = (
    ("python", "-m", "sglang.launch_server"),
    ("python3", "-m", "sglang.launch_server"),
    ("sglang", "serve"),
)


class _Engine(NamedTuple):
    """An engine whose flags were resolved.

    has_block: it has a DFlash drafter.  alone: DFlash is its only drafter.  asked_tokens: the
    user's value of --speculative-num-draft-tokens.
    """

    args: ServerArgs
    settings: PluginSettings
    has_block: bool
    alone: bool
    algorithm: str
    asked_tokens: int | None

    @property
    def view(self) -> Any:
        """Returns SGLang's view of the arguments."""
        return sglang_api.resolving(self.args)

    @property
    def block(self) -> tuple[str, str | None]:
        """Returns the path and the revision of the DFlash drafter."""
        if self.alone:
            view = self.view
            return view.speculative_draft_model_path, view.speculative_draft_model_revision
        return self.settings.dflash_model_path, self.settings.dflash_revision or None


def verdict(flags: Sequence[str]) -> Verdict:
    """Returns the verdict for SGLang's flags.  Raises InputError or PluginError.

    Loads the plugin into this process.
    """
    version = versions.sglang_version()
    if not version:
        raise InputError(
            "SGLang is not installed in this environment: run this in the engine's image or "
            "environment, where the shim is installed too"
        )
    # The plugin is off without it.
    os.environ[SIDECAR_VARIABLE] = os.environ.get(SIDECAR_VARIABLE) or SIDECAR
    from engine_shim.sglang.api.settings import load_settings

    settings = load_settings()
    first = settings.version_check("SGLang", version, versions.TESTED)
    if first.obstacle:
        return Verdict("SGLang", version, (first,))
    begun = (first, protobuf_check())
    if begun[-1].obstacle:
        return Verdict("SGLang", version, begun)
    try:
        return _of_known_version(version, settings, begun, flags)
    except ImportError as error:
        raise InputError(f"SGLang {version} cannot be imported here: {error}") from error


def _of_known_version(
    version: str, settings: PluginSettings, begun: Sequence[Check], flags: Sequence[str]
) -> Verdict:
    from sglang.srt.plugins import load_plugins

    from engine_shim.sglang.server_args import kind_checks, wish_checks

    load_plugins()
    args, assumed = _parsed(flags)
    view = sglang_api.resolving(args)
    alone = sglang_api.is_dflash_only(view)
    engine = _Engine(
        args, settings, alone or settings.dflash_model_path != "", alone,
        (view.speculative_algorithm or "").lower(), view.speculative_num_draft_tokens,
    )  # fmt: skip
    try:
        kinds = kind_checks(view, settings)
    except PluginError as error:
        raise InputError(str(error)) from error
    checks = [*begun, _plugin_check(), *wish_checks(view, settings), *kinds]
    if any(check.obstacle for check in kinds):
        # SGLang itself may fail on these flags.
        return Verdict("SGLang", version, tuple(checks))
    is_resolved = not any(check.obstacle for check in checks)
    checks += _resolution(engine, is_resolved=is_resolved)
    if not is_resolved:
        return Verdict("SGLang", version, tuple(checks))
    checks += _checkpoint_checks(engine)
    found = Verdict("SGLang", version, tuple(checks), _facts(view, assumed))
    if not found.is_steered:
        return found
    drafters = _drafters(engine)
    return Verdict(
        "SGLang", version, found.checks, found.facts, drafters, _memory(engine),
        variables_of(settings, settings.gammas),
    )  # fmt: skip


def _parsed(flags: Sequence[str]) -> tuple[ServerArgs, bool]:
    """Returns the arguments, and whether a CUDA device was assumed where no device was found."""
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils.common import get_device

    options = flags_behind(_LAUNCHERS, flags)
    assumed = False
    if not any(option.split("=")[0] == "--device" for option in options):
        try:
            get_device()
        except RuntimeError:
            assumed = True
            options += ["--device", "cuda"]
    try:
        with parsing("SGLang"):
            return prepare_server_args(options), assumed
    except InputError:
        raise
    except Exception as error:
        # SGLang reads files of the user here, and may raise any error.
        raise InputError(f"SGLang: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Returns an error of SGLang on one line, with its type unless it is a plain input error."""
    words = " ".join(str(error).split())
    own = isinstance(error, ValueError | OSError) and words
    return words if own else f"{type(error).__name__}: {words}"


def _plugin_check() -> Check:
    from engine_shim.sglang.api import hook_check

    allowed = os.environ.get("SGLANG_PLUGINS", "")
    missing = not hook_check.registered_targets()
    return checked(
        "plugin",
        "not loaded" if missing else "loaded",
        {
            f"SGLANG_PLUGINS={allowed} leaves it out: add speculation_controller": (
                missing and allowed
            ),
            "SGLang does not find it: install speculation-controller-shim in this environment": (
                missing
            ),
        },
    )


def _resolution(engine: _Engine, *, is_resolved: bool) -> list[Check]:
    """Lets SGLang resolve the arguments; returns the checks of the result.  Raises InputError.

    is_resolved: earlier checks have no obstacle, so SGLang reaches its speculation step.
    """
    from engine_shim.sglang.server_args import flag_checks, resolution_checks

    refusal = ""
    try:
        engine.args.resolve_once()
    except PluginError as error:
        refusal = str(error)
    except Exception as error:
        # As above.
        raise InputError(f"SGLang refuses these flags itself: {_reason(error)}") from error
    found = list(flag_checks(engine.args, engine.settings, has_block=engine.has_block))
    if is_resolved:
        found += resolution_checks(engine.args, engine.settings)
        if refusal and refusal not in {check.refusal for check in found}:
            found.append(Check("the start", "refused", refusal))
    return found


def _checkpoint_checks(engine: _Engine) -> list[Check]:
    """Checks the drafters' configurations, the key of request classes, and online updates."""
    from engine_shim.sglang.drafters.drafter_fit import drafter_checks

    found = list(drafter_checks(engine.args, engine.settings))
    if engine.has_block and not any(check.obstacle for check in found):
        path, _ = engine.block
        found.append(_checked_by("block of DFlash", path, lambda: _block_obstacle(engine, path)))
    if engine.settings.class_key_file:
        found.append(_key_check(engine.settings.class_key_file))
    if engine.settings.online_updates:
        from engine_shim.sglang.learning.learning_steps import refused_device

        refused = refused_device(engine.view.device, several=engine.view.tp_size > 1)
        found.append(Check("online updates", "on", refused))
    return found


def _key_check(file: str) -> Check:
    from engine_shim.sglang.request_wishes import read_key

    def read() -> str:
        read_key(file)
        return ""

    return _checked_by("key of request classes", file, read)


def _checked_by(topic: str, found: str, obstacle: Callable[[], str]) -> Check:
    try:
        return Check(topic, found, obstacle())
    except PluginError as error:
        return Check(topic, found, str(error))
    except (ValueError, OSError, KeyError, AttributeError) as error:
        return Check(topic, found, f"its configuration cannot be read: {error}")


def _block_config(engine: _Engine) -> Any:
    from engine_shim.sglang.drafters.dflash_checkpoint import draft_config

    return draft_config(engine.args, *engine.block)


def _block_obstacle(engine: _Engine, path: str) -> str:
    from engine_shim.sglang.drafters import dflash_checkpoint

    size = dflash_checkpoint.block_size(_block_config(engine))
    return (
        dflash_checkpoint.no_room(size, engine.settings.gammas[-1] + 1)
        or (engine.alone and dflash_checkpoint.other_width(engine.asked_tokens, size))
        or dflash_checkpoint.trained_mask(path)
    )


def _facts(view: Any, assumed: bool) -> dict[str, str]:
    """Returns properties that are not an obstacle, whatever their value is."""
    device = f"{view.device}, assumed because none was found here" if assumed else view.device
    return {
        "tensor parallelism": str(view.tp_size),
        "overlap schedule": "off" if view.disable_overlap_schedule else "on",
        "page size": str(view.page_size or 1),
        "device": str(device),
    }


def _drafters(engine: _Engine) -> tuple[Drafter, ...]:
    """Returns the drafters as the engine would introduce them."""
    from engine_shim.sglang.drafters.dflash_checkpoint import block_size, lengths_of_block
    from engine_shim.sglang.engine_description import DFLASH_NAME, add_lookup
    from speculation.v1 import engine_pb2

    gammas = engine.settings.gammas
    blocks = lengths_of_block(gammas, block_size(_block_config(engine))) if engine.has_block else ()
    own = blocks if engine.alone else gammas
    spec = engine_pb2.EngineSpec()
    spec.drafters.add(
        name=engine.algorithm, gammas=own, model=engine.view.speculative_draft_model_path or ""
    )
    if engine.has_block and not engine.alone:
        lengths = [gamma for gamma in blocks if gamma]
        path = engine.settings.dflash_model_path
        spec.drafters.add(name=DFLASH_NAME, gammas=lengths, model=path)
    if engine.settings.lookup:
        add_lookup(spec)
    return tuple(Drafter(one.name, tuple(one.gammas), one.model) for one in spec.drafters)


def _memory(engine: _Engine) -> Memory:
    from engine_shim.preflight.memory import page, share_of
    from engine_shim.sglang.server_args import SteeredConfiguration

    prediction = SteeredConfiguration(engine.settings).predict(engine.args)
    share = share_of(engine.args)
    values: dict[str, Any] = {
        "total_mib": prediction.total,
        "start": prediction.start,
        "attention_backends": prediction.shape.names,
        "is_exact": prediction.shape.exact,
        "lengths": [asdict(row) | {"total": row.total} for row in prediction.reserves],
        "parts": dict(prediction.parts),
    }
    lines = [*page(prediction, share).splitlines(), f"Together: {prediction.total:.1f} MiB"]
    if engine.has_block and not engine.alone:
        second = _second_drafter(engine)
        values["second_drafter"] = second
        lines += _second_drafter_lines(second)
    return Memory(values, tuple(lines))


def _second_drafter(engine: _Engine) -> dict[str, Any]:
    """Calculates the memory per rank of a DFlash drafter beside the engine's own drafter."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    config, target = _block_config(engine), model_config_of(engine.args)
    files = sorted(Path(engine.settings.dflash_model_path).glob("*.safetensors"))
    layers = int(config.num_hidden_layers)
    heads, size = int(config.get_num_kv_heads(engine.view.tp_size)), int(config.head_dim)
    width = 1 if engine.view.kv_cache_dtype.startswith("fp8") else target.dtype.itemsize
    return {
        "weights_mib": sum(file.stat().st_size for file in files) / _MIB if files else None,
        "layers": layers,
        "kv_heads": heads,
        "head_dim": size,
        "cache_bytes_per_number": width,
        "cache_bytes_per_token": 2 * layers * heads * size * width,
    }


def _second_drafter_lines(second: dict[str, Any]) -> list[str]:
    weights = second["weights_mib"]
    size = "unknown, because the checkpoint is not in a local folder"
    return [
        "Second drafter, weights: "
        + (size if weights is None else f"{weights:.1f} MiB, the size of its files"),
        (
            f"Second drafter, cache: {second['cache_bytes_per_token']} bytes for each token of "
            f"context (2 x {second['layers']} layers x {second['kv_heads']} heads x "
            f"{second['head_dim']} x {second['cache_bytes_per_number']} bytes), so SGLang's cache "
            "holds fewer tokens"
        ),
    ]
