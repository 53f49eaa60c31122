"""The command line as an image installs it."""

import os
import sys
from pathlib import Path


def commands_on_path(folder: Path) -> str:
    """PATH with `controller` as it is installed in an image."""
    folder.mkdir()
    script = folder / "controller"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m controller.cli "$@"\n')
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
