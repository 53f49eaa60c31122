"""Run in SGLang's environment: which attention kernel a forward pass is sent to.

    python -m tests.unit.lab.standin.one_token_probe ASKED FOUND

ASKED: a JSON object with the sequences' `lengths` and `rows`.  FOUND: file for one: by kind of
pass, what planned it and what attended.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_cpu_standin import verify_one_as_decoding

SEQUENCES = json.loads(sys.argv[1])


class Backend(IntelAMXAttnBackend):  # type: ignore[misc]
    """One without a model."""

    def __init__(self) -> None:
        self.draft_decode_metadata: Any = None
        self.req_to_token_pool: Any = SimpleNamespace(req_to_token="the table")
        self.planned: list[str] = []


def attend(backend: Backend, mode: ForwardMode, width: int) -> Any:
    """The kernel that a pass is sent to, and with what."""
    batch = SimpleNamespace(
        forward_mode=mode,
        spec_info=SimpleNamespace(draft_token_num=width),
        seq_lens=torch.tensor(SEQUENCES["lengths"]),
        req_pool_indices=torch.tensor(SEQUENCES["rows"]),
    )
    backend.planned.clear()
    backend.init_forward_metadata(batch)
    return [*backend.planned, *backend.forward_extend("q", "k", "v", "layer", batch)]


def decode(backend: Backend, *_: Any) -> list[Any]:
    """In place of the decode kernel's call."""
    table, lengths, rows = backend.draft_decode_metadata
    return ["decode", table, lengths.tolist(), rows.tolist()]


def main() -> None:
    """Before the kernels are replaced by their names, which no other process sees."""
    replaced = {
        "init_forward_metadata": lambda backend, _: backend.planned.append("planned"),
        "forward_extend": lambda *_: ["extend"],
        "forward_decode": decode,
    }
    for name, instead in replaced.items():
        type.__setattr__(IntelAMXAttnBackend, name, instead)
    verify_one_as_decoding()
    backend = Backend()
    passes = {
        "verify 1": (ForwardMode.TARGET_VERIFY, 1),
        "verify 2": (ForwardMode.TARGET_VERIFY, 2),
    }
    passes |= {"extend": (ForwardMode.EXTEND, 1), "follow": (ForwardMode.DRAFT_EXTEND_V2, 1)}
    kernel_names = {}
    for name, (mode, width) in passes.items():
        attend(backend, ForwardMode.TARGET_VERIFY, 1)
        kernel_names[name] = attend(backend, mode, width)
    Path(sys.argv[2]).write_text(json.dumps(kernel_names))


if __name__ == "__main__":
    main()
