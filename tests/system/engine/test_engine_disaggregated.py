"""The decode side of disaggregated serving, steered; Mooncake carries the cache over TCP.

It runs where Mooncake is installed: `pip install mooncake-transfer-engine-non-cuda`, which needs
Debian's libibverbs1, librdmacm1 and libnuma1.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.harness.ports import free_port
from tests.support.engine import EAGLE3, MODES, EngineProcess, serving
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import PROMPTS
from tests.support.scripted_sidecar import Arm, scripted_sidecar

pytest.importorskip("mooncake.engine", reason="Mooncake is not installed", exc_type=ImportError)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 1, 2, 3, 5, 7)
ASLEEP: Arm = (0, True)
ARMS: list[Arm] = [*((gamma, False) for gamma in GAMMAS), ASLEEP, ASLEEP]
GREEDY = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}


@dataclass(frozen=True)
class Prefills:
    """A server for prefills only, which is not steered, and where others ask for its caches."""

    engine: EngineProcess
    options: list[str]
    bootstrap_port: int


@pytest.fixture(scope="module")
def prefills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefills]:
    port = free_port()
    options = [
        *EAGLE3,
        "--speculative-num-steps", "3",
        "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", "4",
        "--disaggregation-transfer-backend", "mooncake_tcp",
        "--disaggregation-bootstrap-port", str(port),
    ]  # fmt: skip
    mode = ("--disaggregation-mode", "prefill")
    with serving(tmp_path_factory.mktemp("prefills"), [*options, *mode]) as engine:
        yield Prefills(engine, options, port)


@pytest.mark.parametrize("way", ["eager", "overlapped"])
def test_decoding_from_another_servers_cache_gives_plain_decodings_tokens(
    way: str, prefills: Prefills, plain: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    choose = random.Random(2)
    arms = choose.choices(ARMS, k=997)
    with scripted_sidecar(tmp_path) as sidecar:
        variables = {
            **sidecar.variables,
            **MODES[way],
            "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
            "SPECULATION_SLEEP_POSITIONS": "12",
        }
        options = [
            *prefills.options,
            "--disaggregation-mode", "decode",
            # The default copies with CUDA.
            "--disaggregation-decode-retraction-backup", "cpu_tensor",
        ]  # fmt: skip
        with serving(tmp_path / "decode", options, variables) as engine:
            eventually(lambda: sidecar.server.introductions, what="the engine introduces itself")
            sidecar.run(lambda count: arms[count % 997])
            for _ in range(2):
                body = {
                    "input_ids": PROMPTS,
                    "sampling_params": GREEDY,
                    "bootstrap_host": ["127.0.0.1"] * len(PROMPTS),
                    "bootstrap_port": [prefills.bootstrap_port] * len(PROMPTS),
                    "bootstrap_room": [choose.randrange(1 << 40) for _ in PROMPTS],
                }
                with ThreadPoolExecutor(1) as other:
                    prefilled = other.submit(prefills.engine.ask, body)
                    answers = engine.ask(body)
                    prefilled.result()
                for answer, tokens in zip(answers, plain["batch"], strict=True):
                    both = min(len(tokens), GREEDY["max_new_tokens"])
                    assert answer["output_ids"][:both] == tokens[:both]
            status = engine.internal_state()["speculation_controller"]
    assert {report.gamma for report in sidecar.reports} == set(GAMMAS)
    assert status["sleep"]["caught_up"] > 0
    assert status["lost"] == []
