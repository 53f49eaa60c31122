"""Run in SGLang's environment: reads command lines as SGLang's own parser does, without serving.

A JSON list of argument lists on stdin; a JSON list of the refusals, "" for none, on stdout.
"""

import argparse
import contextlib
import io
import json
import sys

from sglang.srt.server_args import ServerArgs


def main() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    refusals = []
    for arguments in json.load(sys.stdin):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(arguments)
            refusals.append("")
        except SystemExit:
            refusals.append(said.getvalue() or "refused")
    print("\n" + json.dumps(refusals))


if __name__ == "__main__":
    main()
