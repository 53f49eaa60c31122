"""One target under atheris (libFuzzer): inputs that reach something new are built upon.

usage: python -m tools.fuzz.guided NAME SECONDS

It keeps what it has learnt in `build/fuzz/NAME`, and the next run continues from there.
"""

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import atheris

# Before anything of the product is imported.
with atheris.instrument_imports(include=["controller", "engine_shim", "simulator", "trainer"]):
    from tools.fuzz.campaign import (
        CORPUS,
        LEARNT_FOLDER,
        TARGETS,
        Watch,
        corpus_files,
        quiet_logging,
        save_finding,
    )
    from tools.fuzz.mutation import MAX_BYTES

_HANG_SECONDS = 10.0
# More than the limit of HungError: for a loop in C, which handles no signal.
_STUCK_SECONDS = 60


def main(name: str, seconds: float) -> None:
    """Fuzzes one target; libFuzzer then ends the process."""
    warnings.simplefilter("error")
    target = TARGETS[name]
    learnt_folder = LEARNT_FOLDER / name
    learnt_folder.mkdir(parents=True, exist_ok=True)
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    seeds = [*target.seeds(), *(path.read_bytes() for path in corpus_files(name))]
    for number, seed in enumerate(seeds):
        (learnt_folder / f"seed-{number}").write_bytes(seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        quiet_logging(),
        target.opened(Path(folder)) as feed,
    ):
        watch = Watch(target, feed, _HANG_SECONDS)
        atheris.Setup(
            [
                sys.argv[0], f"-max_total_time={max(1, round(seconds))}", f"-max_len={MAX_BYTES}",
                f"-timeout={_STUCK_SECONDS}", "-rss_limit_mb=4096",
                f"-artifact_prefix={CORPUS / name}/", str(learnt_folder),
            ],
            _make_feed(watch),
            custom_mutator=lambda data, most, seed: target.mutate(Random(seed), data, seeds)[:most],
        )  # fmt: skip
        atheris.Fuzz()


def _make_feed(watch: Watch) -> Callable[[bytes], Any]:
    """A feed that saves each finding at once, because libFuzzer ends the process itself."""

    def feed_input(data: bytes) -> None:
        finding_count = len(watch.findings)
        watch.feed_input(data)
        if len(watch.findings) > finding_count:
            finding = list(watch.findings.values())[-1]
            path = save_finding(watch.target.name, finding)
            print(f"\n{watch.target.name}: {finding.place}\n{path}\n{finding.text}", flush=True)

    return feed_input


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
