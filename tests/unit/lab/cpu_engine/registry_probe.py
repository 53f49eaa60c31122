"""Run in SGLang's environment: writes the module of each model class that is named, as JSON.

python -m tests.unit.lab.cpu_engine.registry_probe FOUND ARCHITECTURE...
"""

import json
import sys
from pathlib import Path

from sglang.srt.models.registry import ModelRegistry


def main() -> None:
    """Writes FOUND."""
    output_name, *names = sys.argv[1:]
    modules = {name: ModelRegistry.resolve_model_cls([name])[0].__module__ for name in names}
    Path(output_name).write_text(json.dumps(modules))


if __name__ == "__main__":
    main()
