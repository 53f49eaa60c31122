"""SGLang's own HTTP server on a CPU: ``python -m engine_shim.cpu.serve --model-path FOLDER [any
SGLang option]``.

Only defaults differ from ``python -m sglang.launch_server``; every option given wins over them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from engine_shim.cpu.environment import STANDIN_FOLDER, cpu_engine_env

# Options a CPU engine cannot do without, or that make no sense on it; each is left out when the
# caller names it.
_DEFAULTS: dict[str, str | None] = {
    "--device": "cpu",
    "--dtype": "float32",
    "--disable-cuda-graph": None,
    "--skip-server-warmup": None,
    "--max-running-requests": "16",
    "--max-total-tokens": "16384",
}


def with_cpu_defaults(arguments: Sequence[str]) -> list[str]:
    """``arguments`` for SGLang's parser, preceded by the CPU defaults that they do not name
    themselves.
    """
    named = {argument.split("=", 1)[0] for argument in arguments}
    defaults: list[str] = []
    for option, value in _DEFAULTS.items():
        if option not in named:
            defaults += [option] if value is None else [option, value]
    return [*defaults, *arguments]


def serve(arguments: Sequence[str]) -> None:
    """Run the server until it is told to stop; must be called in an environment from
    ``cpu_engine_env``.
    """
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(with_cpu_defaults(arguments))
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def main() -> None:
    """Enter the CPU environment, which has to stand before the interpreter starts, and serve."""
    if str(STANDIN_FOLDER) not in sys.path or os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        os.execve(
            sys.executable,
            [sys.executable, "-m", "engine_shim.cpu.serve", *sys.argv[1:]],
            cpu_engine_env(),
        )
    serve(sys.argv[1:])


if __name__ == "__main__":
    main()
