"""Runs SGLang's own HTTP server on an emulated GPU.

``python -m lab.cpu_engine.serve_emulated_cuda [any SGLang option]`` is ``python -m
sglang.launch_server`` in the environment of an emulated CUDA device (lab/standin/emulated_cuda).
It adds no option, so that a command for a GPU can be tried as it is.
"""

import sys

from lab.cpu_engine.environment import enter_emulated_cuda
from lab.cpu_engine.serve import require_sglang, run_sglang


def main() -> None:
    """Serves until it is stopped, then ends the processes that SGLang started."""
    require_sglang("lab.cpu_engine.serve_emulated_cuda")
    enter_emulated_cuda()
    run_sglang(sys.argv[1:])


# A spawned process imports this module again.
if __name__ == "__main__":
    main()
