"""Run in SGLang's environment: resolves configurations as a launcher would, without launching.

    python -m tests.unit.engine_shim.sglang.resolve_probe ASKED FOUND

ASKED: file with a JSON list of ServerArgs keyword arguments.  FOUND: file for the JSON list of the
results.  DEVICE_MIB: memory of a card that SGLang is to believe in.
"""

import json
import os
import sys
from pathlib import Path

from sglang.srt.arg_groups import memory_hook
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from engine_shim.sglang.api import sglang_api

SHOWN = (
    "speculative_adaptive",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)


def main() -> None:
    load_plugins()
    mebibytes = os.environ.get("DEVICE_MIB")
    if mebibytes:
        memory_hook.get_device_memory_capacity = lambda *_: int(mebibytes)
    results = []
    asked, answers = map(Path, sys.argv[1:])
    for arguments in json.loads(asked.read_text()):
        try:
            args = ServerArgs(**arguments)
            args.resolve_once()
            view = resolving_view(args)
            resolved_arguments = {name: getattr(view, name) for name in SHOWN}
            if mebibytes:
                resolved_arguments["mem_fraction_static"] = view.mem_fraction_static
                resolved_arguments["largest_graph_batch"] = max(
                    sglang_api.captured_batch_sizes(args), default=0
                )
            results.append(resolved_arguments)
        except Exception as error:  # noqa: BLE001 - whatever SGLang raises is the result
            results.append({"error": f"{type(error).__name__}: {error}"})
    answers.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
