"""Run in SGLang's environment: resolves configurations as a launcher would, without launching.

Reads a JSON list of ServerArgs keyword arguments on stdin, writes a JSON list of what came of them.
"""

import json
import sys

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

SHOWN = (
    "speculative_adaptive",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)


def main() -> None:
    load_plugins()
    results = []
    for arguments in json.load(sys.stdin):
        try:
            args = ServerArgs(**arguments)
            args.resolve_once()
            view = resolving_view(args)
            results.append({name: getattr(view, name) for name in SHOWN})
        except Exception as error:  # noqa: BLE001 - whatever SGLang raises is the result
            results.append({"error": f"{type(error).__name__}: {error}"})
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
