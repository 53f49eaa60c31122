"""Fuzzes for minutes or hours, guided by what of the product each input reaches.

usage: python -m tools.fuzz [--minutes M] [--target NAME]... [--jobs N]

Every target gets an equal share of the time, in its own process.  Input that breaks a target is
put into `tools/fuzz/corpus`, where `tests/system/fuzz/test_fuzz.py` replays it from then on; the
exit code is 1.
"""

import argparse
import concurrent.futures
import subprocess
import sys
from pathlib import Path

from tools.fuzz.campaign import CORPUS, LEARNT_FOLDER, TARGETS

# Beyond its share, for what a process does before and after.
_GRACE_SECONDS = 120.0


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--list", action="store_true", help="the targets' names")
    options = parser.parse_args()
    if options.list:
        print("\n".join(TARGETS))
        return 0
    names = options.target or list(TARGETS)
    seconds = 60 * options.minutes * options.jobs / len(names)
    corpus_before = _corpus_files()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        codes = list(pool.map(lambda name: _fuzz(name, seconds), names))
    new = sorted(_corpus_files() - corpus_before)
    for path in new:
        print(f"found: {path}")
    return int(bool(new) or any(codes))


def _fuzz(name: str, seconds: float) -> int:
    command = [sys.executable, "-m", "tools.fuzz.guided", name, str(seconds)]
    LEARNT_FOLDER.mkdir(parents=True, exist_ok=True)
    log = LEARNT_FOLDER / f"{name}.log"
    try:
        with log.open("wb") as output:
            code = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds + _GRACE_SECONDS,
                check=False,
            ).returncode
    except subprocess.TimeoutExpired:
        code = 1
    last = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
    print(f"{name}: {last}" + (f" (exit code {code}, see {log})" if code else ""), flush=True)
    return code


def _corpus_files() -> set[Path]:
    return {path for path in CORPUS.rglob("*") if path.is_file()}


if __name__ == "__main__":
    sys.exit(main())
