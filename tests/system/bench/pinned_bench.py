"""What being steered costs: `python -m tests.system.bench.pinned_bench` (about 3 minutes).

Two real CPU engines with the same EAGLE3 drafter stand beside each other: SGLang's own at a fixed
gamma, and one with the plugin, a real `controller serve` beside it and an override that pins the
same gamma.  Both answer the same prompts in turn; a ratio is that of two answers one after the
other, tokens/s of the pinned engine over those of SGLang's.
"""

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

import grpc

from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.engine import DEEP_EAGLE3, EngineProcess, serving
from tests.support.eventually import eventually
from tests.support.sidecar_process import controller, sidecar_process
from tests.system.bench.measurement import RATIO, Measurement, run
from tests.system.bench.pairs import ratios, seconds_of

_GAMMA = 3
_BATCHES = (1, 8)
_FIXED = (
    "--speculative-num-steps", str(_GAMMA),
    "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", str(_GAMMA + 1),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """A ratio for each batch."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        with (
            sidecar_process(place, "--log-level", "error") as sidecar,
            serving(place / "fixed", [*DEEP_EAGLE3, *_FIXED], {}) as fixed,
            serving(
                place / "pinned",
                DEEP_EAGLE3,
                {"SPECULATION_SIDECAR": sidecar.address, "SPECULATION_ENGINE_ID": "pinned"},
            ) as pinned,
        ):
            done = controller(
                "override", "set", "--address", sidecar.address, "--engine", "pinned",
                "--gamma", str(_GAMMA), "--reason", "a benchmark",
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(done.stderr)
            seconds_of(pinned, "json", 1, 50)
            eventually(
                lambda: _last_gamma(sidecar.address) == _GAMMA, within=60.0, what="gamma is pinned"
            )
            for size in _BATCHES:

                def seconds(engine: EngineProcess, size: int = size) -> float:
                    return seconds_of(engine, "json", size, options.tokens)

                yield Measurement(
                    f"steered and pinned, over SGLang's own gamma = {_GAMMA}, B = {size}",
                    RATIO,
                    ratios(fixed, pinned, seconds, options.repeats),
                    at_least=0.995,
                )


def _last_gamma(address: str) -> int:
    """Of the newest step that the sidecar knows."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.InspectionServiceStub(channel)
        engines = stub.ListEngines(service_pb2.ListEnginesRequest()).engines
    return engines[0].last_report.gamma


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="pairs of answers for each figure")
    parser.add_argument("--tokens", type=int, default=300, help="new tokens of each request")
    run(parser, measure, "tests.system.bench.pinned_bench")


if __name__ == "__main__":
    main()
