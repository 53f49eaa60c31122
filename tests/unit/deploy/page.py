"""docs/deploy.md, and the commands in it."""

import re

from tests.unit.deploy.manifests import ROOT

PAGE = ROOT / "docs" / "deploy.md"


def by_hand() -> str:
    """The walk-through's script."""
    (script,) = re.findall(r"<!-- by hand -->\n```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(script)


def sglang_by_hand() -> str:
    """Its one command that needs an engine, on one line, without what comes before it."""
    (command,) = re.findall(r"sglang serve ((?:.*\\\n)*.*) &\n", by_hand())
    return str(command).replace("\\\n", " ")
