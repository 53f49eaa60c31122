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
from engine_shim.preflight.running_engine import DRAFTER, MODEL, fetch_flags
from engine_shim.preflight.verdict import InputError, Verdict, render_text, replace_unprintable

STEERED, NOT_STEERED, BAD_INPUT = 0, 1, 2

# Limit in characters of a path from the running engine in an error text.
_MAX_PATH_CHARACTERS: Final = 200
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
    separator_index = arguments.index("--") if "--" in arguments else len(arguments)
    argument_parser = build_parser()
    parsed_options = argument_parser.parse_args(arguments[:separator_index])
    flags = list(arguments[separator_index + 1 :])
    if not (parsed_options.url or flags) or (
        parsed_options.url and parsed_options.engine != "sglang"
    ):
        argument_parser.error("the engine's flags are needed after --, or the --url of an SGLang")
    try:
        if parsed_options.url:
            verdict = _verdict_of_running_engine(parsed_options.url, flags)
        else:
            verdict = _run_quietly(lambda: _verdict(parsed_options.engine, flags))
    except (InputError, PluginError) as error:
        sys.stderr.write(f"would-steer: {replace_unprintable(str(error))}\n")
        return BAD_INPUT
    if parsed_options.output == "json":
        sys.stdout.write(json.dumps(verdict.document(), indent=2).replace("\x7f", "\\u007f") + "\n")
    else:
        sys.stdout.write(render_text(verdict, shutil.get_terminal_size().columns))
    return STEERED if verdict.is_steered else NOT_STEERED


def _verdict_of_running_engine(url: str, user_flags: list[str]) -> Verdict:
    """Makes the verdict from the safe flags of a running SGLang and the flags that the user adds.

    user_flags: the user's flags, which take precedence.  Raises InputError or PluginError.
    """
    engine_flags = fetch_flags(url)
    names = {flag.partition("=")[0] for flag in user_flags}
    missing = [
        f"{options[0]} (the answer says {ascii(answered_path)[:_MAX_PATH_CHARACTERS]})"
        if answered_path
        else options[0]
        for options, answered_path, is_needed in (
            (MODEL, engine_flags.model, True),
            (DRAFTER, engine_flags.drafter, engine_flags.drafter != ""),
        )
        if is_needed and not names & {*options, "--config"}
    ]
    if missing:
        raise InputError(
            f"paths that SGLang loads are not taken from {url}, because the answer is not trusted: "
            f"give {' and '.join(missing)} after `--`"
        )
    engine_verdict = _run_quietly(lambda: _verdict("sglang", [*engine_flags.flags, *user_flags]))
    return replace(
        engine_verdict, left_out=tuple(name for name in engine_flags.left_out if name not in names)
    )


def _verdict(engine: str, flags: list[str]) -> Verdict:
    return sglang.verdict(flags) if engine == "sglang" else vllm.verdict(flags)


def _run_quietly(make: Callable[[], Verdict]) -> Verdict:
    """Suppresses the log lines, warnings and output of the engine's package.

    Errors still go to standard error.
    """
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        return make()


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options before the engine's flags."""
    argument_parser = argparse.ArgumentParser(
        prog="speculation-would-steer",
        description="Says whether an engine with these flags would be steered, what that\n"
        "takes, and what to change if not.  Loads no weights and needs no GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    argument_parser.add_argument(
        "engine", choices=("sglang", "vllm"), help="followed by -- and its flags"
    )
    argument_parser.add_argument(
        "--url", default="", help="of a running SGLang, which names its flags"
    )
    argument_parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    return argument_parser


if __name__ == "__main__":
    main()
