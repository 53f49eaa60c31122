"""Runs SGLang's own HTTP server on a CPU.

``python -m lab.cpu_engine.serve --model-path FOLDER [any SGLang option]`` is
``python -m sglang.launch_server`` with other defaults; every option given wins over them.

``--pace NAME|FILE --dilation X`` lets every step last as long as a table says, times X: a published
name, a step-cost CSV, or a profile (see lab/cpu_engine/pace).  ``--pace-log FILE`` has every step
appended to a file.  Acceptance is the models' own.

With LAB_LOCKSTEP=1 steps wait for the drafter's trainer (see serve.py).
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from select import select
from typing import Final

from lab.cpu_engine.environment import PACE_VARIABLE, enter_cpu_environment

_DEFAULTS: dict[str, tuple[str, ...]] = {
    "--device": ("cpu",),
    # The dtype in which a token's bits do not depend on the batch, so speculation is exact.
    "--dtype": ("float32",),
    "--skip-server-warmup": (),
    # SGLang would size its cache by the machine's memory and take most of it.
    "--max-running-requests": ("16",),
    "--max-total-tokens": ("16384",),
    # An idle scheduler would keep a core busy.
    "--sleep-on-idle": (),
}
_NO_GRAPHS: dict[str, tuple[str, ...]] = {"--disable-cuda-graph": ()}
_NO_OVERLAP = "--disable-overlap-schedule"
# With CPU_ENGINE_GRAPHS=1, see lab/standin/cpu_graphs.  Larger batches run without a graph.
_GRAPHS: dict[str, tuple[str, ...]] = {
    "--cuda-graph-backend-prefill": ("disabled",),
    "--cuda-graph-bs-decode": ("1", "2", "4", "8"),
}
LOCKSTEP_VARIABLE: Final = "LAB_LOCKSTEP"
# A trainer that takes longer has failed, and the engine serves without it.
_MAX_WAIT_SECONDS: Final = 120.0


def with_cpu_defaults(arguments: Sequence[str]) -> list[str]:
    """Returns the CPU defaults that ``arguments`` do not name themselves, then ``arguments``.

    A paced engine begins a step when the last one's tokens are known: without overlap.
    """
    named = {argument.split("=", 1)[0] for argument in arguments}
    defaults: list[str] = []
    graphs = os.environ.get("CPU_ENGINE_GRAPHS") == "1"
    for option, values in (_DEFAULTS | (_GRAPHS if graphs else _NO_GRAPHS)).items():
        if option not in named:
            defaults += [option, *values]
    if os.environ.get(PACE_VARIABLE) and _NO_OVERLAP not in named:
        defaults.append(_NO_OVERLAP)
    return [*defaults, *arguments]


def apply_pace_options(arguments: Sequence[str]) -> list[str]:
    """Sets LAB_PACE if the arguments ask for a pace; returns the arguments for SGLang.

    Ends the command with one sentence for a table that cannot be read, for a dilation that cannot
    be, and for options of a pace without one.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--pace")
    parser.add_argument("--dilation", type=float)
    parser.add_argument("--pace-log", default="")
    options, sglang_arguments = parser.parse_known_args(arguments)
    if not options.pace and (options.dilation is not None or options.pace_log):
        raise SystemExit("lab.cpu_engine.serve: --dilation and --pace-log need --pace")
    if options.pace:
        from lab.cpu_engine.pace.pacer import Pace
        from simulator.errors import InvalidInputError

        try:
            dilation = 1.0 if options.dilation is None else options.dilation
            pace = Pace(options.pace, dilation, options.pace_log)
            pace.costs()
        except (InvalidInputError, ValueError) as error:
            raise SystemExit(f"lab.cpu_engine.serve --pace: {error}") from error
        os.environ[PACE_VARIABLE] = pace.as_json()
    return sglang_arguments


def main() -> None:
    """Serves until it is stopped, then ends the processes that SGLang started."""
    require_sglang("lab.cpu_engine.serve")
    arguments = apply_pace_options(sys.argv[1:])
    enter_cpu_environment()
    run_sglang(with_cpu_defaults(arguments))


def require_sglang(command: str) -> None:
    """Ends the command with one sentence where SGLang cannot be imported."""
    if find_spec("sglang") is None:
        raise SystemExit(
            f"{command} needs SGLang, which cannot be imported. Run it with the environment that "
            "`make setup` makes in the clone."
        )


def run_sglang(arguments: Sequence[str]) -> None:
    """Runs SGLang's server in this process, whose environment is that of an engine."""
    # A plugin may only hook what is imported where it is loaded: the processes' own modules too,
    # for those that are forked.
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    install_lockstep()
    server_args = prepare_server_args(list(arguments))
    # A data-parallel controller starts its schedulers from threads, where a fork may hang; with
    # data-parallel attention it starts them from its main thread.
    if server_args.dp_size == 1 or server_args.enable_dp_attention:
        fork_processes()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def fork_processes() -> None:
    """Makes SGLang fork its processes, so that they begin with what is imported already.

    SGLang spawns them for CUDA's sake, and each of the three then imports it again for seconds.
    """
    multiprocessing.set_start_method("fork")
    # SGLang sets its own, by this very name.
    multiprocessing.set_start_method = lambda *_, **__: None


def install_lockstep() -> None:
    """Wraps the plugin's updates if the variable asks for it; before SGLang forks its processes."""
    if os.environ.get(LOCKSTEP_VARIABLE) != "1":
        return
    from engine_shim.sglang.learning.online_updates import OnlineUpdates

    before_step = OnlineUpdates.before_step

    def wait_before_step(self: OnlineUpdates) -> None:
        channel = self._trainer._channel
        if channel is not None and not self._is_trainer_idle:
            select([channel._socket], [], [], _MAX_WAIT_SECONDS)
        before_step(self)

    type.__setattr__(OnlineUpdates, "before_step", wait_before_step)


# A spawned process imports this module again.
if __name__ == "__main__":
    main()
