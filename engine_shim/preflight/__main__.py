"""The command `speculation-would-steer`: tells whether an engine with these flags is steered."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from engine_shim.common.errors import PluginError
from engine_shim.preflight import sglang, vllm
from engine_shim.preflight.running_engine import DRAFTER, MODEL, flags_of
from engine_shim.preflight.verdict import InputError, Verdict, page, printable

STEERED, NOT_STEERED, BAD_INPUT = 0, 1, 2

# Limit in characters of a path from the running engine in an error text.
_PATH_MAX: Final = 200
_EPILOG: Final = """\
examples:
  speculation-would-steer sglang -- --model-path MODEL \\
    --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT
  speculation-would-steer sglang --url http://127.0.0.1:30000 -- \\
    --model-path MODEL --speculative-draft-model-path DRAFT
  speculation-would-steer vllm -- serve MODEL --speculative-config '{...}'

--url takes switches, numbers and single words of the engine's answer. What
SGLang would load code, files or configuration for stands after --, so that
you choose it: the model, and its drafter if it has one.
SPECULATION_* variables of the environment count as they would for the engine.
exit codes: 0 it would be steered, 1 it would not, 2 bad input, or the package
of the engine is not installed here
"""


def main() -> None:
    """Entry point of the `speculation-would-steer` script."""
    raise SystemExit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Prints the answer for a command line; returns the exit code."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser()
    asked = options.parse_args(arguments[:at])
    flags = list(arguments[at + 1 :])
    if not (asked.url or flags) or (asked.url and asked.engine != "sglang"):
        options.error("the engine's flags are needed after --, or the --url of an SGLang")
    try:
        if asked.url:
            verdict = _of_running_engine(asked.url, flags)
        else:
            verdict = _quietly(lambda: _verdict(asked.engine, flags))
    except (InputError, PluginError) as error:
        sys.stderr.write(f"would-steer: {printable(str(error))}\n")
        return BAD_INPUT
    if asked.output == "json":
        sys.stdout.write(json.dumps(verdict.document(), indent=2).replace("\x7f", "\\u007f") + "\n")
    else:
        sys.stdout.write(page(verdict, shutil.get_terminal_size().columns))
    return STEERED if verdict.is_steered else NOT_STEERED


def _of_running_engine(url: str, own: list[str]) -> Verdict:
    """Makes the verdict from the safe flags of a running SGLang and the flags that the user adds.

    own: the user's flags, which take precedence.  Raises InputError or PluginError.
    """
    taken = flags_of(url)
    names = {flag.partition("=")[0] for flag in own}
    missing = [
        f"{options[0]} (the answer says {ascii(said)[:_PATH_MAX]})" if said else options[0]
        for options, said, is_needed in (
            (MODEL, taken.model, True),
            (DRAFTER, taken.drafter, taken.drafter != ""),
        )
        if is_needed and not names & {*options, "--config"}
    ]
    if missing:
        raise InputError(
            f"paths that SGLang loads are not taken from {url}, because the answer is not trusted: "
            f"give {' and '.join(missing)} after `--`"
        )
    found = _quietly(lambda: _verdict("sglang", [*taken.flags, *own]))
    return replace(found, left_out=tuple(name for name in taken.left_out if name not in names))


def _verdict(engine: str, flags: list[str]) -> Verdict:
    return sglang.verdict(flags) if engine == "sglang" else vllm.verdict(flags)


def _quietly(make: Callable[[], Verdict]) -> Verdict:
    """Suppresses the log lines, warnings and output of the engine's package.

    Errors still go to standard error.
    """
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        return make()


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the options before the engine's flags."""
    found = argparse.ArgumentParser(
        prog="speculation-would-steer",
        description="Says whether an engine with these flags would be steered, what that\n"
        "takes, and what to change if not.  Loads no weights and needs no GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("engine", choices=("sglang", "vllm"), help="followed by -- and its flags")
    found.add_argument("--url", default="", help="of a running SGLang, which names its flags")
    found.add_argument("-o", "--output", choices=("text", "json"), default="text")
    return found


if __name__ == "__main__":
    main()
