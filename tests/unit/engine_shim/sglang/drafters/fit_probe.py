"""Run in SGLang's environment: asks of many command lines whether they would be steered.

    python -m tests.unit.engine_shim.sglang.drafters.fit_probe ASKED FOUND

ASKED: file with a JSON list of pairs, variables and flags of SGLang.  FOUND: file for the JSON list
of what was said: a document of the command, or an error that it prints.
"""

import json
import os
import sys
from pathlib import Path

from engine_shim.common.errors import PluginError
from engine_shim.preflight import sglang
from engine_shim.preflight.verdict import InputError


def main() -> None:
    asked, output_path = map(Path, sys.argv[1:])
    results = []
    for variables, flags in json.loads(asked.read_text()):
        os.environ.update(variables)
        try:
            results.append(sglang.verdict(flags).document())
        except (InputError, PluginError) as error:
            results.append({"error": str(error)})
        for name in variables:
            del os.environ[name]
    output_path.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
