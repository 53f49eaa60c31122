"""Makes ranks with different batches run one draft length, for data-parallel attention.

With data-parallel attention every rank runs the attention of its own batch, and all ranks run the
other layers together.  So all ranks, idle ones included, must launch the same passes in each step.
Before each step SGLang gathers the number of sequences of every rank
(`MLPSyncBatchInfo.all_gather`).  Every rank looks up the same plan, adopted before the same step,
for the largest of these batches, to which SGLang pads the others.  No collective is added.

Requests that a rank's scheduler adds stay within that rank's group.  Only control requests that
rank 0 receives reach all ranks, so plans travel as control requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine_shim.common.checks import Check, make_check
from engine_shim.sglang.api import sglang_api, versions

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from engine_shim.sglang.api.settings import PluginSettings

_version_api: Any = versions.module_for(versions.sglang_version())
_COMPONENTS: Final = "sglang.srt.managers.scheduler_components"

# Returns SGLang's own reason against adaptive speculation.
ADAPTIVE_UNSUPPORTED_REASON: Final = (
    "sglang.srt.speculative.adaptive_spec_params.adaptive_unsupported_reason"
)
# Writes what was gathered into a rank's batch.
UPDATE_GATHER_BATCH: Final = f"{_COMPONENTS}.dp_attn._update_gather_batch"
# Returns the requests that have arrived at a rank, control requests included.
PULL_RAW_REQUESTS: Final = f"{_COMPONENTS}.request_receiver.SchedulerRequestReceiver._pull_raw_reqs"


def is_enabled() -> bool:
    """Whether the engine of this process, once it is configured, has data-parallel attention."""
    enabled: bool = _version_api.is_attention_dp_enabled()
    return enabled


def around_adaptive_reason(original: Any, args: ServerArgs) -> str | None:
    """Wraps `ADAPTIVE_UNSUPPORTED_REASON`, which objects to ranks that differ: they cannot."""
    with _version_api.disabled_attention_dp():
        reason: str | None = original(args)
    return reason


def attention_dp_check(args: ServerArgs, settings: PluginSettings, *, has_dflash: bool) -> Check:
    """Checks whether an engine with data-parallel attention can be steered.

    has_dflash: the engine has a DFlash drafter.
    """
    from sglang.srt.environ import envs

    view = sglang_api.resolved_args(args)
    topic, lead = "data-parallel attention", "data-parallel attention cannot be steered: "
    if not _version_api.has_attention_dp(view):
        return Check(topic, "off")
    if not _version_api.STEERS_ATTENTION_DP:
        return Check(topic, "on", f"SGLang {versions.TESTED[-1]} is needed", lead)
    obstacles = {
        "a DFlash drafter is untested with it": has_dflash,
        "SPECULATION_ONLINE_UPDATES is untested with it": settings.online_updates,
        "SPECULATION_SIGNALS_FOLDER is untested with it": settings.signals_folder != "",
        "SPECULATION_LOOKUP would have an idle rank draft where the others look up": (
            settings.lookup
        ),
        "--disaggregation-mode is untested with it": view.disaggregation_mode != "null",
        "--enable-dp-attention-local-control-broadcast keeps plans from the other ranks": (
            view.enable_dp_attention_local_control_broadcast
        ),
        "--elastic-ep-backend is untested with it": view.elastic_ep_backend is not None,
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER keeps ranks from knowing each other's batches": (
            envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get()
        ),
        "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION is untested with it": (
            envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get()
        ),
    }
    return make_check(topic, "on", obstacles, lead)


def store_rank_sizes(_: None, batch: Any, gathered: Any, *__: Any, **___: Any) -> None:
    """Runs after `UPDATE_GATHER_BATCH`: stores each rank's number of sequences for the step."""
    batch.speculation_sizes = gathered.global_num_tokens


def largest_batch(batch: Any) -> int:
    """Returns the number of sequences for which a decode step's choice is looked up.

    With data-parallel attention that is the largest rank's number, otherwise the batch's own.
    """
    rank_sizes: list[int] | None = getattr(batch, "speculation_sizes", None)
    local_size: int = batch.seq_lens.shape[0]
    return local_size if rank_sizes is None else max(rank_sizes)
