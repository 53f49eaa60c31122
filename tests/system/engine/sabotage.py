"""SGLang plugins that get in this plugin's way, for tests."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_shim.sglang.api import sglang_api


def break_telemetry_hook() -> None:
    """SGLang cannot apply one hook (it changed, say), logs that and continues."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply_target = HookRegistry._apply_target

    def fail_for_one(target: str, hooks: Any) -> None:
        if target == sglang_api.RESOLVE_TOKENS:
            raise AttributeError("sabotaged")
        apply_target(target, hooks)

    HookRegistry._apply_target = fail_for_one


def bring_back_sglangs_policy() -> None:
    """SGLang's worker constructs its own policy after all."""
    if sglang_api.SCHEDULER_MODULE not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import adaptive_spec_params

    own = adaptive_spec_params.AdaptiveSpeculativeParams

    def restore(scheduler: Any) -> None:
        from sglang.srt.speculative import eagle_worker_v2

        eagle_worker_v2.AdaptiveSpeculativeParams = own

    target = f"{sglang_api.SCHEDULER_MODULE}.Scheduler.maybe_init_draft_worker"
    HookRegistry.register(target, restore, HookType.BEFORE)


def break_block_drafter() -> None:
    """DFlash's attention fails, as when memory is out."""
    _break_block_drafter(lambda: True)


def break_block_drafter_on_demand() -> None:
    """DFlash's attention fails as soon as the file SABOTAGE_FILE exists."""
    _break_block_drafter(lambda: Path(os.environ["SABOTAGE_FILE"]).exists())


def break_block_capture() -> None:
    """DFlash drafts, but its graphs cannot be captured, as when memory is out."""
    import torch

    # Only an emulated device has it.
    cpu: Any = torch.cpu
    # The emulation comes later.
    _break_block_drafter(lambda: bool(cpu.is_current_stream_capturing()))


def _break_block_drafter(fails: Callable[[], bool]) -> None:
    if sglang_api.SCHEDULER_MODULE not in sys.modules:
        return
    from sglang.srt.models import dflash

    forward = dflash.DFlashAttention.forward

    def fail_or_forward(*arguments: Any, **named: Any) -> Any:
        if fails():
            raise MemoryError("sabotaged")
        return forward(*arguments, **named)

    type.__setattr__(dflash.DFlashAttention, "forward", fail_or_forward)


def refuse_graphs_on_demand() -> None:
    """Graphs of the pass that the file SABOTAGE_FILE names are not used."""
    if sglang_api.SCHEDULER_MODULE not in sys.modules:
        return
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
        EAGLEDraftExtendCudaGraphRunner,
    )

    file = Path(os.environ["SABOTAGE_FILE"])
    asked = EAGLEDraftCudaGraphRunner, EAGLEDraftExtendCudaGraphRunner, DecodeCudaGraphRunner
    originals = [runner.can_run_graph for runner in asked]
    names = "draft", "draft_extend", "block"
    for runner, original, name in zip(asked, originals, names, strict=True):

        def can_run_graph(
            self: Any, batch: Any, original: Any = original, name: str = name
        ) -> bool:
            if name == "block" and not self.model_runner.is_draft_worker:
                return bool(original(self, batch))
            refused = file.exists() and file.read_text() == name
            return not refused and bool(original(self, batch))

        type.__setattr__(runner, "can_run_graph", can_run_graph)


def wait_for_the_device() -> None:
    """Every step begins with a call that waits for the device."""
    if sglang_api.SCHEDULER_MODULE not in sys.modules:
        return
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def wait(*_: Any, **__: Any) -> None:
        torch.ones(1, device="cuda").item()

    HookRegistry.register(
        f"{sglang_api.SCHEDULER_MODULE}.Scheduler.run_batch", wait, HookType.BEFORE
    )


def let_one_rank_differ() -> None:
    """The second scheduler to start has other variables, as on another host."""
    if multiprocessing.parent_process() is None or sglang_api.SCHEDULER_MODULE not in sys.modules:
        return
    try:
        Path(os.environ["FIRST_RANK"]).mkdir()
    except FileExistsError:
        os.environ["SPECULATION_GAMMAS"] = "0,1,3,7"


def retract_often() -> None:
    """Every 25 steps some requests have to give up their memory, as when it is full.

    RETRACT_INTERVAL: another number of steps.
    """
    scheduler = sys.modules.get(sglang_api.SCHEDULER_MODULE)
    if scheduler is not None:
        interval = int(os.environ.get("RETRACT_INTERVAL", "25"))
        vars(scheduler).update(TEST_RETRACT=True, TEST_RETRACT_INTERVAL=interval)


def show_served_weights() -> None:
    """Each rank leaves what it serves, and what is good, in the folder SERVED_WEIGHTS.

    Rank 0 also leaves what the trainer has made, and what it knows of the target.  While a file is
    there: `unreadable`: rank 1 cannot read a version; `ruined`: what the trainer makes is noise;
    `not_finite`: it is given NaN to learn from.
    """
    if sglang_api.SCHEDULER_MODULE not in sys.modules:
        return
    import torch

    from engine_shim.sglang.api import ranks
    from engine_shim.sglang.learning.online_weights import OnlineWeights
    from engine_shim.sglang.learning.student import DrafterWeights
    from engine_shim.sglang.training.versions import Versions

    folder = Path(os.environ["SERVED_WEIGHTS"])
    serve, keep, load, land = (
        DrafterWeights.serve, DrafterWeights.mark_good, Versions.load_parameters,
        OnlineWeights.apply_trained,
    )  # fmt: skip

    def show(name: str, weights: Any) -> None:
        part = folder / f"{name}{ranks.peers().rank}.part"
        torch.save(dict(weights), part)
        part.rename(part.with_suffix(".pt"))

    def serve_and_show(self: DrafterWeights, weights: Any) -> None:
        serve(self, weights)
        show("rank", self.copy())

    def keep_and_show(self: DrafterWeights) -> None:
        keep(self)
        show("good", self.good)

    def land_and_show(self: OnlineWeights, whole: Any, generation: int) -> Any:
        if whole and (folder / "ruined").exists():
            whole = {name: torch.randn_like(part) for name, part in whole.items()}
        if whole:
            show("made", whole)
        return land(self, whole, generation)

    def load_or_fail(self: Versions, version: int, like: Any) -> Any:
        if ranks.peers().rank and (folder / "unreadable").exists():
            raise OSError("sabotaged")
        return load(self, version, like)

    type.__setattr__(DrafterWeights, "serve", serve_and_show)
    type.__setattr__(DrafterWeights, "mark_good", keep_and_show)
    type.__setattr__(OnlineWeights, "apply_trained", land_and_show)
    type.__setattr__(Versions, "load_parameters", load_or_fail)
    _watch_trainer(folder, show)


def _watch_trainer(folder: Path, show: Callable[[str, Any], None]) -> None:
    import torch

    from engine_shim.sglang.learning.trainer_process import TrainerProcess
    from engine_shim.sglang.training import trainer
    from engine_shim.sglang.training.exchange import Message, MessageKind

    send, share_borrowed = TrainerProcess.send, TrainerProcess.share_borrowed

    def send_or_spoil(self: TrainerProcess, message: Message) -> bool:
        if message.kind is MessageKind.LEARN and (folder / "not_finite").exists():
            self.tensors["features"].fill_(torch.nan)
        return send(self, message)

    def share_and_show(self: TrainerProcess) -> None:
        share_borrowed(self)
        tensors = self.tensors.items()
        show("borrowed", {n: part for n, part in tensors if n.startswith(trainer.BORROWED_PREFIX)})

    type.__setattr__(TrainerProcess, "send", send_or_spoil)
    type.__setattr__(TrainerProcess, "share_borrowed", share_and_show)
