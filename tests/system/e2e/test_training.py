"""TIDE from end to end: traffic shifts, signals are kept, a trainer makes a version, it serves."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event

import grpc
import pytest

from lab.cpu_engine.models.prompts import held_out_prompts
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.engine import CODE_ONLY, EngineProcess, environment, running_engine
from tests.support.eventually import eventually
from tests.support.sidecar_process import controller, sidecar_process

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

ENGINE_ID = "shifting"
TOKENS = 300
MOST_WAVES = 25
# Small numbers, so that a test of a minute or two sees it all.
SMALL = {
    "CONTROLLER_TRAINING__INITIAL": "12",
    "CONTROLLER_TRAINING__MARGIN": "0.2",
    "CONTROLLER_TRAINING__THRESHOLD": "16",
    "CONTROLLER_TRAINING__UNIT_DRAFTS": "48",
}


@contextmanager
def trainer(folder: Path, sidecar: str, signals: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "trainer.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", "attend"],
            env=environment(
                folder,
                {"SPECULATION_SIDECAR": sidecar, "SPECULATION_SIGNALS_FOLDER": str(signals)},
            ),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait(120)


class Watched:
    """An engine under the sidecar; `wave` sends traffic and says what the sidecar makes of it."""

    def __init__(self, engine: EngineProcess, channel: grpc.Channel) -> None:
        self._engine = engine
        self._inspection = service_pb2_grpc.InspectionServiceStub(channel)
        self.lengths: list[float] = []

    @property
    def training(self) -> service_pb2.TrainingExplanation:
        # A sidecar limits the calls a second.
        time.sleep(0.05)
        question = service_pb2.ExplainRequest(engine_id=ENGINE_ID)
        answer: service_pb2.ExplainResponse = self._inspection.Explain(question, timeout=60)
        return answer.training

    def introduced(self) -> bool:
        return bool(self._inspection.ListEngines(service_pb2.ListEnginesRequest()).engines)

    def wave(self, domain: str, seed: int) -> list[list[int]]:
        """The tokens of four requests."""
        prompts = held_out_prompts(domain, count=4, length_tokens=60, seed=seed)
        answers = self._engine.generate(prompts, [TOKENS] * 4)
        steps = sum(answer.meta["spec_verify_ct"] for answer in answers)
        self.lengths.append(4 * TOKENS / steps)
        return [answer.tokens for answer in answers]

    @contextmanager
    def waves(self, domain: str, seed: int) -> Iterator[None]:
        """One wave after the other, for as long as the context lasts."""
        end = Event()

        def send() -> None:
            for number in count(seed):
                if end.is_set():
                    return
                self.wave(domain, number)

        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send)
            try:
                yield
            finally:
                end.set()
            sending.result()

    def status(self) -> dict[str, object]:
        controller_state: dict[str, object] = self._engine.internal_state()[
            "speculation_controller"
        ]
        return controller_state


def test_a_shift_is_learnt_beside_the_engine(tmp_path: Path) -> None:
    signals = tmp_path / "signals"
    with sidecar_process(tmp_path / "sidecar", environment=SMALL) as sidecar:
        variables = {
            "SPECULATION_SIDECAR": sidecar.address,
            "SPECULATION_ENGINE_ID": ENGINE_ID,
            "SPECULATION_SIGNALS_FOLDER": str(signals),
        }
        with (
            running_engine(tmp_path / "engine", CODE_ONLY, variables) as engine,
            grpc.insecure_channel(sidecar.address) as channel,
        ):
            watched = Watched(engine, channel)
            eventually(watched.introduced, description="the engine introduces itself")
            with trainer(tmp_path, sidecar.address, signals) as first:
                eventually(
                    lambda: watched.training.phase == "watching", description="a trainer is there"
                )
                # A second one has nothing to do here.
                with trainer(tmp_path, sidecar.address, signals) as second:
                    assert second.wait(120) == 3
                # The controller would draft occasionally only, and learn from as few steps.
                pin = ["--fleet", "--gamma", "3", "--reason", "every step drafts"]
                done = controller("override", "set", "--address", sidecar.address, *pin)
                assert not done.returncode, done.stderr
                seed = 0
                # The drafter is at home in code: nothing is kept.
                while watched.training.measured < 12 or seed < 2:
                    watched.wave("code", seed)
                    seed += 1
                assert (watched.training.phase, watched.training.rounds) == ("watching", 0)
                assert not list(signals.glob("*.safetensors"))
                before = watched.wave("json", 1000)
                # A round may be shorter than a wave.
                with watched.waves("json", seed):
                    eventually(
                        lambda: watched.training.phase == "training",
                        timeout_seconds=300,
                        description="the trainer trains",
                    )
                    # In the midst of it.
                    first.send_signal(signal.SIGKILL)
                    first.wait(120)
            eventually(
                lambda: watched.training.phase == "no trainer", description="its end is noticed"
            )
            (signals / "00000000000000000000-0-0.safetensors").write_bytes(b"\0" * 100)
            with trainer(tmp_path, sidecar.address, signals):
                while watched.training.served_version == 0:
                    watched.wave("json", seed)
                    seed += 1
                    assert seed < 2 * MOST_WAVES, watched.training
                # Requests that began with the new version.
                after = [watched.wave("json", 1000), watched.wave("json", 1000)]
            training, status = watched.training, watched.status()
    print(f"tokens a step {[round(length, 2) for length in watched.lengths]}")
    print(
        [
            (ended_round.outcome, ended_round.round.alpha_train, ended_round.round.alpha_eval)
            for ended_round in training.past
        ]
    )
    assert training.past[0].outcome == "deployed"
    assert training.past[0].round.round == 1
    assert training.past[0].round.alpha_eval > training.past[0].round.alpha_train + 0.1
    assert watched.lengths[-1] > 1.3
    # Not one token is another one.
    assert after == [before, before]
    assert status["draft"]["version"] == training.served_version  # type: ignore[index]
    assert "signal_passed_over" in (tmp_path / "trainer.log").read_text()
