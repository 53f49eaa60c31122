"""Each other version of SGLang that the plugin says it is tested with, running."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine_shim.sglang.api.versions import TESTED, sglang_version
from lab.harness.scripted_sidecar import scripted_sidecar
from tests.support.engine import DFLASH, DFLASH_ONLY, EAGLE3, TARGET, fork_engine, running_engine
from tests.support.eventually import eventually
from tests.support.installed_wheel import unpack_sglang
from tests.support.prompts_in_flight import play_any_order

pytestmark = [
    pytest.mark.engine,
    pytest.mark.packaging,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

GAMMAS = (0, 1, 3, 7)
OWN = [*((gamma, False, 0) for gamma in GAMMAS), (0, True, 0)]
SECOND = [(gamma, False, 1) for gamma in GAMMAS[1:]]


OTHERS = [v for v in TESTED if v != sglang_version()]


@pytest.mark.parametrize("version", OTHERS)
def test_it_says_beforehand_whether_an_engine_would_be_steered(
    version: str, tmp_path: Path
) -> None:
    def ran(*flags: str) -> tuple[int, str]:
        words = ["sglang", "--", "--model-path", str(TARGET), *EAGLE3, *flags]
        variables = {
            "PYTHONPATH": str(unpack_sglang(version)),
            "SPECULATION_DFLASH_MODEL_PATH": str(DFLASH),
        }
        log = tmp_path / "output"
        process = fork_engine("engine_shim.preflight", words, tmp_path, variables, log)
        return process.wait(120), log.read_text()

    code, output = ran()
    assert (code, output.splitlines()[0]) == (
        0,
        f"SGLang {version}: this engine would be steered.",
    )
    assert "  dflash  draft lengths 1,2,3,5,7\n" in output
    code, output = ran("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    assert code == 1
    assert "-> SGLang 0.5.23 is needed" in output


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize(
    ("arguments", "second", "arms"),
    [(EAGLE3, str(DFLASH), [*OWN, *SECOND]), (DFLASH_ONLY, "", OWN)],
    ids=["two drafters", "DFlash alone"],
)
def test_any_order_of_arms_gives_plain_decodings_tokens(
    version: str,
    arguments: Sequence[str],
    second: str,
    arms: list[tuple[int, bool, int]],
    plain: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    with scripted_sidecar(tmp_path) as sidecar:
        variables = {
            "PYTHONPATH": str(unpack_sglang(version)),
            **sidecar.variables,
            "SPECULATION_DFLASH_MODEL_PATH": second,
            "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
            "SPECULATION_SLEEP_POSITIONS": "8",
        }
        with running_engine(tmp_path / "engine", arguments, variables) as engine:
            eventually(lambda: sidecar.introductions, description="the engine introduces itself")
            # The model is the same, and so are its tokens in every version.
            reports = play_any_order(engine, sidecar, arms, 3, plain["batch"], catches_up=True)
            status = engine.internal_state()["speculation_controller"]
    spec = sidecar.introductions[0]
    assert spec.fingerprint.engine_version == version
    assert {(r.drafter, r.gamma) for r in reports} == {
        (spec.drafters[which].name, gamma) for gamma, _, which in arms
    }
    assert status["sleep"]["caught_up"] > 0
    assert status["sleep"]["cold"] == 0
    accepted = sum(k * n for r in reports for k, n in enumerate(r.accepted_counts))
    # How many depends on how long each arm has run.
    assert accepted > len(reports) / 2
