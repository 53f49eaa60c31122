"""The decode side of disaggregated serving, steered; Mooncake carries the cache over TCP.

It runs where Mooncake is installed: `pip install mooncake-transfer-engine-non-cuda`, which needs
Debian's libibverbs1, librdmacm1 and libnuma1.
"""

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.harness.processes import free_port
from lab.harness.scripted_sidecar import Arm, ScriptedSidecar, scripted_sidecar
from tests.support.engine import EAGLE3, MODES, EngineProcess, running_engine
from tests.support.eventually import eventually
from tests.support.mixture_rules import rules_of
from tests.support.prompts_in_flight import PLAYS_MAX, PROMPTS

pytest.importorskip("mooncake.engine", reason="Mooncake is not installed", exc_type=ImportError)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 1, 2, 3, 5, 7)
ASLEEP: Arm = (0, True)
ARMS: list[Arm] = [*((gamma, False) for gamma in GAMMAS), ASLEEP, ASLEEP]
NAMES = ("eagle3", "ngram", "eagle3+ngram")
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}


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
    with running_engine(tmp_path_factory.mktemp("prefills"), [*options, *mode]) as engine:
        yield Prefills(engine, options, port)


@contextmanager
def decoding(
    prefills: Prefills,
    sidecar: ScriptedSidecar,
    folder: Path,
    variables: Mapping[str, str],
    *more: str,
) -> Iterator[EngineProcess]:
    """A steered server that decodes what `prefills` has read."""
    steered = {
        **sidecar.variables,
        **variables,
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_SLEEP_POSITIONS": "12",
    }
    options = [
        *prefills.options,
        "--disaggregation-mode", "decode",
        # The default copies with CUDA.
        "--disaggregation-decode-retraction-backup", "cpu_tensor",
        *more,
    ]  # fmt: skip
    with running_engine(folder, options, steered) as engine:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield engine


def answered(
    engine: EngineProcess, prefills: Prefills, sampling: object, choose: random.Random
) -> list[list[int]]:
    """The answers of both servers together to all prompts at once."""
    body = {
        "input_ids": PROMPTS,
        "sampling_params": sampling,
        "bootstrap_host": ["127.0.0.1"] * len(PROMPTS),
        "bootstrap_port": [prefills.bootstrap_port] * len(PROMPTS),
        "bootstrap_room": [choose.randrange(1 << 40) for _ in PROMPTS],
    }
    with ThreadPoolExecutor(1) as other:
        prefilled = other.submit(prefills.engine.ask, body)
        answers = engine.ask(body)
        prefilled.result()
    return [answer["output_ids"] for answer in answers]


def assert_plain(answers: list[list[int]], plain: list[list[int]]) -> None:
    for answer_tokens, tokens in zip(answers, plain, strict=True):
        both = min(len(tokens), GREEDY["max_new_tokens"])
        assert answer_tokens[:both] == tokens[:both]


@pytest.mark.parametrize("way", ["eager", "overlapped"])
def test_decoding_from_another_servers_cache_gives_plain_decodings_tokens(
    way: str, prefills: Prefills, plain: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    choose = random.Random(2)
    arms = choose.choices(ARMS, k=997)
    with (
        scripted_sidecar(tmp_path) as sidecar,
        decoding(prefills, sidecar, tmp_path / "decode", MODES[way]) as engine,
    ):
        sidecar.run(lambda count: arms[count % 997])
        # On a busy machine a plan comes for every few steps only.
        for _ in range(PLAYS_MAX):
            assert_plain(answered(engine, prefills, GREEDY, choose), plain["batch"])
            status = engine.internal_state()["speculation_controller"]
            ran = {report.gamma for report in sidecar.reports}
            if ran == set(GAMMAS) and status["sleep"]["caught_up"]:
                break
    assert ran == set(GAMMAS)
    assert status["sleep"]["caught_up"] > 0
    assert status["lost"] == []


# The first one keeps all requests; with the second one some are retracted and come back.
@pytest.mark.parametrize("most_tokens", [4096, 640])
@pytest.mark.parametrize("way", ["eager", "overlapped"])
def test_a_lookup_knows_what_another_server_has_read(
    way: str,
    most_tokens: int,
    prefills: Prefills,
    plain: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    choose = random.Random(3)
    drafting: list[Arm] = [(gamma, False, which) for gamma in GAMMAS[1:] for which in (0, 1, 2)]
    arms = choose.choices([*drafting, (0, False), ASLEEP], k=997)
    with scripted_sidecar(tmp_path) as sidecar:
        sidecar.rules = rules_of(NAMES[2:], GAMMAS)
        variables = {**MODES[way], "SPECULATION_LOOKUP": "1", "SPECULATION_CLASSES": "label"}
        limit = ("--max-total-tokens", str(most_tokens), "--num-reserved-decode-tokens", "1")
        with decoding(prefills, sidecar, tmp_path / "decode", variables, *limit) as engine:
            sidecar.run(lambda count: arms[count % 997])
            # One of the requests must not be drafted for, and another one has a class.
            wishes = [{"speculation": False}, {"speculation_class": "a"}, *[None] * 6]
            sampling = [GREEDY | {"custom_params": wish} for wish in wishes]
            for _ in range(PLAYS_MAX):
                assert_plain(answered(engine, prefills, sampling, choose), plain["batch"])
                reports = sidecar.reports
                matches = [part for r in reports for part in r.proposals if part.match_length]
                if {report.drafter for report in reports} == set(NAMES) and len(matches) > 50:
                    break
            status = engine.internal_state()["speculation_controller"]
            retracted = "KV cache pool is full. Retract requests" in engine.log.read_text()
    assert retracted == (most_tokens < 4096)
    assert status["lost"] == []
    assert {report.drafter for report in reports} == set(NAMES)
    groups = {group.drafter for report in reports for group in report.groups}
    assert groups == {"", "eagle3", "ngram"}
    assert {part.label for report in reports for part in report.classes} == {"a"}
    assert len(matches) > 50
