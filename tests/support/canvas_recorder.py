"""An SGLang plugin that writes down what drafters propose, for tests."""

import json
import os
from pathlib import Path
from typing import Any

CANVASES = "RECORDED_CANVASES"


def record_canvases() -> None:
    """Appends every canvas of a request that runs alone to a file, as [context, tokens]."""
    import torch

    from engine_shim.sglang.learning.online_updates import OnlineUpdates

    after_verify = OnlineUpdates.after_verify

    def record(self: Any, verification: Any, stride: int) -> None:
        if len(verification.request_ids) == 1:
            # The engine lists what waits for a device; this is no part of it.
            with torch._C.DisableTorchFunction():
                line = [int(verification.batch.seq_lens[0]), verification.tokens.tolist()]
            with Path(os.environ[CANVASES]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        after_verify(self, verification, stride)

    type.__setattr__(OnlineUpdates, "after_verify", record)
