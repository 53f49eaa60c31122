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
LEARNT = Path("build/fuzz")
# Of one input, on a machine where others work.
HANG_SECONDS = 20.0
# By which one input may raise the most memory that the process ever had.
MEMORY_BYTES = 384 * 1024 * 1024


class HungError(BaseException):
    """An input that takes for ever; nothing that reads input may catch it."""


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

    def take(self, data: bytes) -> None:
        """Feeds one input."""
        self.fed += 1
        before = _peak_bytes()
        try:
            with _limited(self.hang_seconds):
                self.feed(data)
            _limit_memory(_peak_bytes() - before)
        except self.target.allowed:
            self.refused += 1
        except (Exception, HungError) as error:  # noqa: BLE001  # whatever it is, it is a finding
            place = _place(error)
            text = "".join(traceback.format_exception(error))
            self.findings.setdefault(place, Finding(data, place, text))


@contextmanager
def quiet() -> Iterator[None]:
    """Silences logging: thousands of refusals would be logged."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        structlog.configure(**before)


def kept(name: str) -> list[Path]:
    """The target's inputs in the corpus: those that once were findings."""
    return sorted((CORPUS / name).glob("*"))


def keep(name: str, finding: Finding) -> Path:
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
        watch.take(data)
    assert watch.refused < len(seeds), f"{watch.target.name}: no seed gets past the first checks"
    for path in kept(watch.target.name):
        watch.take(path.read_bytes())


def fuzz(watch: Watch, examples: int, seconds: float, seed: int = 0) -> None:
    """Feeds inputs mutated from seeds and corpus, `examples` of them or for `seconds`."""
    seeds = [*watch.target.seeds(), *(path.read_bytes() for path in kept(watch.target.name))]
    until = time.monotonic() + seconds
    for number in itertools.count():
        if number >= examples or time.monotonic() >= until:
            return
        rng = Random(f"{watch.target.name} {seed} {number}")
        data = rng.choice(seeds)
        watch.take(watch.target.mutate(rng, data, seeds))
        if number % 256 == 0:
            gc.collect()


def _limit_memory(taken: int) -> None:
    if taken > MEMORY_BYTES:
        raise HungryError(f"one input took {taken} bytes of memory")


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise HungError(f"the target did not return within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/fuzz/campaign" not in frame.filename]
    last = ours[-1] if ours else None
    where = f"{Path(last.filename).name}:{last.lineno}" if last else ""
    # gRPC raises all statuses at one place.
    said = str(error)[:80] if "tools/fuzz/" in (last.filename if last else "") else ""
    return f"{type(error).__name__} {where} {said}".strip()
