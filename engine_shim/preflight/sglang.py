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

from engine_shim.common.checks import Check, make_check, protobuf_check
from engine_shim.common.errors import PluginError
from engine_shim.preflight.verdict import (
    DEFAULT_SIDECAR,
    Drafter,
    InputError,
    Memory,
    Verdict,
    environment_variables,
    raise_input_errors,
    strip_launcher,
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

    has_dflash: it has a DFlash drafter.  is_dflash_only: DFlash is its only drafter.
    requested_draft_tokens: the user's value of --speculative-num-draft-tokens.
    """

    args: ServerArgs
    settings: PluginSettings
    has_dflash: bool
    is_dflash_only: bool
    algorithm: str
    requested_draft_tokens: int | None

    @property
    def view(self) -> Any:
        """Returns SGLang's view of the arguments."""
        return sglang_api.resolving_args(self.args)

    @property
    def dflash_source(self) -> tuple[str, str | None]:
        """Returns the path and the revision of the DFlash drafter."""
        if self.is_dflash_only:
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
    os.environ[SIDECAR_VARIABLE] = os.environ.get(SIDECAR_VARIABLE) or DEFAULT_SIDECAR
    from engine_shim.sglang.api.settings import load_settings

    settings = load_settings()
    version_check = settings.version_check("SGLang", version, versions.TESTED)
    if version_check.obstacle:
        return Verdict("SGLang", version, (version_check,))
    initial_checks = (version_check, protobuf_check())
    if initial_checks[-1].obstacle:
        return Verdict("SGLang", version, initial_checks)
    try:
        return _verdict_of_known_version(version, settings, initial_checks, flags)
    except ImportError as error:
        raise InputError(f"SGLang {version} cannot be imported here: {error}") from error


def _verdict_of_known_version(
    version: str, settings: PluginSettings, initial_checks: Sequence[Check], flags: Sequence[str]
) -> Verdict:
    from sglang.srt.plugins import load_plugins

    from engine_shim.sglang.server_args import checkpoint_kind_checks, requested_flag_checks

    load_plugins()
    args, is_cuda_assumed = _parse_flags(flags)
    view = sglang_api.resolving_args(args)
    is_dflash_only = sglang_api.is_dflash_only(view)
    engine = _Engine(
        args, settings, is_dflash_only or settings.dflash_model_path != "", is_dflash_only,
        (view.speculative_algorithm or "").lower(), view.speculative_num_draft_tokens,
    )  # fmt: skip
    try:
        kind_check_results = checkpoint_kind_checks(view, settings)
    except PluginError as error:
        raise InputError(str(error)) from error
    checks = [
        *initial_checks,
        _plugin_check(),
        *requested_flag_checks(view, settings),
        *kind_check_results,
    ]
    if any(check.obstacle for check in kind_check_results):
        # SGLang itself may fail on these flags.
        return Verdict("SGLang", version, tuple(checks))
    is_resolved = not any(check.obstacle for check in checks)
    checks += _resolve_and_check(engine, is_resolved=is_resolved)
    if not is_resolved:
        return Verdict("SGLang", version, tuple(checks))
    checks += _checkpoint_checks(engine)
    fact_verdict = Verdict("SGLang", version, tuple(checks), _facts(view, is_cuda_assumed))
    if not fact_verdict.is_steered:
        return fact_verdict
    drafters = _drafters(engine)
    return Verdict(
        "SGLang", version, fact_verdict.checks, fact_verdict.facts, drafters, _memory(engine),
        environment_variables(settings, settings.gammas),
    )  # fmt: skip


def _parse_flags(flags: Sequence[str]) -> tuple[ServerArgs, bool]:
    """Returns the arguments, and whether a CUDA device was assumed where no device was found."""
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils.common import get_device

    options = strip_launcher(_LAUNCHERS, flags)
    is_cuda_assumed = False
    if not any(option.split("=")[0] == "--device" for option in options):
        try:
            get_device()
        except RuntimeError:
            is_cuda_assumed = True
            options += ["--device", "cuda"]
    try:
        with raise_input_errors("SGLang"):
            return prepare_server_args(options), is_cuda_assumed
    except InputError:
        raise
    except Exception as error:
        # SGLang reads files of the user here, and may raise any error.
        raise InputError(f"SGLang: {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    """Returns an error of SGLang on one line, with its type unless it is a plain input error."""
    message = " ".join(str(error).split())
    is_plain_error = isinstance(error, ValueError | OSError) and message
    return message if is_plain_error else f"{type(error).__name__}: {message}"


def _plugin_check() -> Check:
    from engine_shim.sglang.api import hook_check

    allowed = os.environ.get("SGLANG_PLUGINS", "")
    missing = not hook_check.registered_targets()
    return make_check(
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


def _resolve_and_check(engine: _Engine, *, is_resolved: bool) -> list[Check]:
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
        raise InputError(f"SGLang refuses these flags itself: {_error_text(error)}") from error
    check_results = list(flag_checks(engine.args, engine.settings, has_dflash=engine.has_dflash))
    if is_resolved:
        check_results += resolution_checks(engine.args, engine.settings)
        if refusal and refusal not in {check.refusal for check in check_results}:
            check_results.append(Check("the start", "refused", refusal))
    return check_results


def _checkpoint_checks(engine: _Engine) -> list[Check]:
    """Checks the drafters' configurations, the key of request classes, and online updates."""
    from engine_shim.sglang.drafters.drafter_fit import drafter_checks

    check_results = list(drafter_checks(engine.args, engine.settings))
    if engine.has_dflash and not any(check.obstacle for check in check_results):
        path, _ = engine.dflash_source
        check_results.append(
            _run_check("block of DFlash", path, lambda: _dflash_obstacle(engine, path))
        )
    if engine.settings.class_key_file:
        check_results.append(_key_check(engine.settings.class_key_file))
    if engine.settings.online_updates:
        from engine_shim.sglang.learning.learning_steps import unsupported_device_reason

        device_reason = unsupported_device_reason(
            engine.view.device, has_other_ranks=engine.view.tp_size > 1
        )
        check_results.append(Check("online updates", "on", device_reason))
    return check_results


def _key_check(file: str) -> Check:
    from engine_shim.sglang.request_options import read_key

    def read_or_raise() -> str:
        read_key(file)
        return ""

    return _run_check("key of request classes", file, read_or_raise)


def _run_check(topic: str, actual: str, find_obstacle: Callable[[], str]) -> Check:
    try:
        return Check(topic, actual, find_obstacle())
    except PluginError as error:
        return Check(topic, actual, str(error))
    except (ValueError, OSError, KeyError, AttributeError) as error:
        return Check(topic, actual, f"its configuration cannot be read: {error}")


def _dflash_config(engine: _Engine) -> Any:
    from engine_shim.sglang.drafters.dflash_checkpoint import draft_config

    return draft_config(engine.args, *engine.dflash_source)


def _dflash_obstacle(engine: _Engine, path: str) -> str:
    from engine_shim.sglang.drafters import dflash_checkpoint

    size = dflash_checkpoint.block_size(_dflash_config(engine))
    return (
        dflash_checkpoint.block_too_large_reason(size, engine.settings.gammas[-1] + 1)
        or (
            engine.is_dflash_only
            and dflash_checkpoint.block_size_mismatch_reason(engine.requested_draft_tokens, size)
        )
        or dflash_checkpoint.trained_mask_reason(path)
    )


def _facts(view: Any, is_cuda_assumed: bool) -> dict[str, str]:
    """Returns properties that are not an obstacle, whatever their value is."""
    device = (
        f"{view.device}, assumed because none was found here" if is_cuda_assumed else view.device
    )
    return {
        "tensor parallelism": str(view.tp_size),
        "overlap schedule": "off" if view.disable_overlap_schedule else "on",
        "page size": str(view.page_size or 1),
        "device": str(device),
    }


def _drafters(engine: _Engine) -> tuple[Drafter, ...]:
    """Returns the drafters as the engine would introduce them."""
    from engine_shim.sglang.drafters.dflash_checkpoint import block_draft_lengths, block_size
    from engine_shim.sglang.engine_description import DFLASH_NAME, add_lookup
    from speculation.v1 import engine_pb2

    gammas = engine.settings.gammas
    dflash_gammas = (
        block_draft_lengths(gammas, block_size(_dflash_config(engine))) if engine.has_dflash else ()
    )
    main_gammas = dflash_gammas if engine.is_dflash_only else gammas
    spec = engine_pb2.EngineSpec()
    spec.drafters.add(
        name=engine.algorithm,
        gammas=main_gammas,
        model=engine.view.speculative_draft_model_path or "",
    )
    if engine.has_dflash and not engine.is_dflash_only:
        positive_dflash_gammas = [gamma for gamma in dflash_gammas if gamma]
        path = engine.settings.dflash_model_path
        spec.drafters.add(name=DFLASH_NAME, gammas=positive_dflash_gammas, model=path)
    if engine.settings.lookup:
        add_lookup(spec)
    return tuple(
        Drafter(drafter.name, tuple(drafter.gammas), drafter.model) for drafter in spec.drafters
    )


def _memory(engine: _Engine) -> Memory:
    from engine_shim.preflight.memory import memory_share_text, prediction_page
    from engine_shim.sglang.server_args import SteeredConfiguration

    prediction = SteeredConfiguration(engine.settings).predict_memory(engine.args)
    share = memory_share_text(engine.args)
    values: dict[str, Any] = {
        "total_mib": prediction.total_mib,
        "start": prediction.start_gamma,
        "attention_backends": prediction.shape.description,
        "is_exact": prediction.shape.is_exact,
        "lengths": [asdict(row) | {"total": row.total_mib} for row in prediction.reserves],
        "parts": dict(prediction.parts_mib),
    }
    lines = [
        *prediction_page(prediction, share).splitlines(),
        f"Together: {prediction.total_mib:.1f} MiB",
    ]
    if engine.has_dflash and not engine.is_dflash_only:
        second = _second_drafter(engine)
        values["second_drafter"] = second
        lines += _second_drafter_lines(second)
    return Memory(values, tuple(lines))


def _second_drafter(engine: _Engine) -> dict[str, Any]:
    """Calculates the memory per rank of a DFlash drafter beside the engine's own drafter."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    config, target = _dflash_config(engine), model_config_of(engine.args)
    files = sorted(Path(engine.settings.dflash_model_path).glob("*.safetensors"))
    layers = int(config.num_hidden_layers)
    heads, head_dim = int(config.get_num_kv_heads(engine.view.tp_size)), int(config.head_dim)
    bytes_per_value = 1 if engine.view.kv_cache_dtype.startswith("fp8") else target.dtype.itemsize
    return {
        "weights_mib": sum(file.stat().st_size for file in files) / _MIB if files else None,
        "layers": layers,
        "kv_heads": heads,
        "head_dim": head_dim,
        "cache_bytes_per_number": bytes_per_value,
        "cache_bytes_per_token": 2 * layers * heads * head_dim * bytes_per_value,
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
