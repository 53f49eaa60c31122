"""Runs `speculation-would-steer` in forks of one process that has imported vLLM, in .venv-vllm.

Arguments: a file with a JSON object of command lines by name, and a file for their codes and
output.  A command whose name ends with a version is run as if that one were installed.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from engine_shim.preflight.__main__ import run
from engine_shim.vllm import vllm_api


def ran(name: str, words: list[str]) -> tuple[int, str]:
    """Exit code and standard output of a command line."""
    version = name.rpartition(" ")[2]
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            code = 99
            try:
                if version[0].isdecimal():
                    vllm_api.vllm_version = lambda: version
                os.dup2(output.fileno(), 1)
                code = run(words)
                sys.stdout.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def main() -> None:
    asked, answers = map(Path, sys.argv[1:])
    from vllm.engine import arg_utils
    from vllm.entrypoints.launchers import cli_args

    assert arg_utils
    assert cli_args
    results = {name: ran(name, words) for name, words in json.loads(asked.read_text()).items()}
    answers.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
