"""Writes the traces of courses of events, as a program whose runs can be compared.

PYTHONHASHSEED=3 python -m tests.system.concurrency.traces --output FILE --examples 5 --seed 1
"""

import argparse
import gc
import logging
from pathlib import Path

from hypothesis import Phase

from tests.system.concurrency.dealing import run, silence
from tests.system.concurrency.machine import Link
from tests.system.concurrency.sequences import REGRESSIONS


def main() -> None:
    """The found sequences first, then those that the machine deals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--garbage", type=int, default=700, help="threshold of the collector")
    options = parser.parse_args()
    gc.set_threshold(options.garbage)
    logging.disable()
    lines: list[str] = []

    class Traced(Link):
        def teardown(self) -> None:
            try:
                super().teardown()
            finally:
                lines.extend(self.world.trace)

    with silence():
        for course in REGRESSIONS:
            state = Traced()
            lines.append(course.__name__)
            try:
                course(state)
            finally:
                state.teardown()
    if options.examples:
        run(Traced, options.examples, options.seed, phases=[Phase.generate])
    options.output.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
