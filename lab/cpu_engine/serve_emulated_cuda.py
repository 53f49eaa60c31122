"""Runs SGLang's own HTTP server on an emulated GPU.

``python -m lab.cpu_engine.serve_emulated_cuda [any SGLang option]`` is ``python -m
sglang.launch_server`` in the environment of an emulated CUDA device (lab/standin/emulated_cuda).
It adds no option, so that a command for a GPU can be tried as it is.
"""

import os
import sys
from importlib.util import find_spec

from lab.cpu_engine.environment import enter_emulated_cuda


def main() -> None:
    """Serves until it is stopped, then ends the processes that SGLang started."""
    if find_spec("sglang") is None:
        raise SystemExit(
            "lab.cpu_engine.serve_emulated_cuda needs SGLang, which cannot be imported. Run it "
            "with the environment that `make setup` makes in the clone."
        )
    enter_emulated_cuda()
    # A plugin may only hook what is imported where it is loaded: the processes' own modules too,
    # for those that are forked.
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from lab.cpu_engine.serve import fork_processes

    load_plugins()
    server_args = prepare_server_args(sys.argv[1:])
    fork_processes()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


# A spawned process imports this module again.
if __name__ == "__main__":
    main()
