"""Feeds a target its corpus, then new input; whatever it must not do is a finding."""

import gc
import hashlib
import itertools
import logging
import resource
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

import structlog

from tools.fuzz.target import Feed, Target
from tools.fuzz.targets import engine, http, rpc, sidecar, simulation, specforge, store

TARGETS: Mapping[str, Target] = {
    target.name: target
    for module in (rpc, sidecar, store, simulation, engine, specforge, http)
    for target in module.TARGETS
}
CORPUS = Path(__file__).parent / "corpus"
# The inputs that guided runs have learnt, and their logs.
LEARNT_FOLDER = Path("build/fuzz")
# Of one input, on a machine where others work.
HANG_SECONDS = 20.0
# By which one input may raise the most memory that the process ever had.
MEMORY_BYTES = 384 * 1024 * 1024


class HungError(BaseException):
    """An input that takes too long; nothing that reads input may catch it."""


class HungryError(Exception):
    """An input that takes too much memory."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input and what it did; place: tells one fault from another."""

    data: bytes
    place: str
    text: str


@dataclass(slots=True)
class Watch:
    """Feeds inputs one by one, and keeps the first of every fault."""

    target: Target
    feed: Feed
    hang_seconds: float = HANG_SECONDS
    fed: int = 0
    refused: int = 0
    findings: dict[str, Finding] = field(default_factory=dict)

    def feed_input(self, data: bytes) -> None:
        """Feeds one input."""
        self.fed += 1
        peak_before = _peak_bytes()
        try:
            with _limited(self.hang_seconds):
                self.feed(data)
            _limit_memory(_peak_bytes() - peak_before)
        except self.target.allowed:
            self.refused += 1
        except (Exception, HungError) as error:  # noqa: BLE001  # whatever it is, it is a finding
            place = _locate(error)
            text = "".join(traceback.format_exception(error))
            self.findings.setdefault(place, Finding(data, place, text))


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Silences the log, which would contain thousands of refusals."""
    saved_config = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        structlog.configure(**saved_config)


def corpus_files(name: str) -> list[Path]:
    """The target's inputs in the corpus: those that once were findings."""
    return sorted((CORPUS / name).glob("*"))


def save_finding(name: str, finding: Finding) -> Path:
    """Puts a finding into the corpus."""
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(finding.data).hexdigest()[:16]
    path.write_bytes(finding.data)
    return path


def replay(watch: Watch) -> None:
    """Feeds the seeds and the corpus."""
    seeds = watch.target.seeds()
    for data in seeds:
        watch.feed_input(data)
    assert watch.refused < len(seeds), f"{watch.target.name}: no seed gets past the first checks"
    for path in corpus_files(watch.target.name):
        watch.feed_input(path.read_bytes())


def fuzz(watch: Watch, examples: int, seconds: float, seed: int = 0) -> None:
    """Feeds inputs mutated from seeds and corpus, `examples` of them or for `seconds`."""
    seeds = [
        *watch.target.seeds(),
        *(path.read_bytes() for path in corpus_files(watch.target.name)),
    ]
    deadline = time.monotonic() + seconds
    for number in itertools.count():
        if number >= examples or time.monotonic() >= deadline:
            return
        rng = Random(f"{watch.target.name} {seed} {number}")
        data = rng.choice(seeds)
        watch.feed_input(watch.target.mutate(rng, data, seeds))
        if number % 256 == 0:
            gc.collect()


def _limit_memory(used_bytes: int) -> None:
    if used_bytes > MEMORY_BYTES:
        raise HungryError(f"one input took {used_bytes} bytes of memory")


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def raise_hung(number: int, frame: FrameType | None) -> None:
        raise HungError(f"the target did not return within {seconds} s")

    previous_handler = signal.signal(signal.SIGALRM, raise_hung)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)


def _locate(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    target_frames = [frame for frame in frames if "/fuzz/campaign" not in frame.filename]
    last = target_frames[-1] if target_frames else None
    location = f"{Path(last.filename).name}:{last.lineno}" if last else ""
    # gRPC raises all statuses at one place.
    message = str(error)[:80] if "tools/fuzz/" in (last.filename if last else "") else ""
    return f"{type(error).__name__} {location} {message}".strip()
