"""Every target: what is right, what once failed, and some new inputs.  Hours: `make fuzz`."""

from pathlib import Path

import pytest

from tools.fuzz.campaign import CORPUS, TARGETS, Watch, fuzz, quiet_logging, replay

EXAMPLES = 1000
# Of one target, where a machine is busy.
SECONDS = 0.5


@pytest.mark.parametrize("name", TARGETS)
def test_bad_input_is_refused_and_nothing_else_happens(name: str, tmp_path: Path):
    target = TARGETS[name]
    with quiet_logging(), target.opened(tmp_path) as feed:
        watch = Watch(target, feed)
        replay(watch)
        fuzz(watch, EXAMPLES, SECONDS)
    assert not watch.findings, "\n\n".join(
        f"{finding.data[:500]!r}\n{finding.text}" for finding in watch.findings.values()
    )


def test_what_is_kept_belongs_to_a_target():
    assert {path.name for path in CORPUS.iterdir() if path.is_dir()} <= set(TARGETS)
