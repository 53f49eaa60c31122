"""A DFlash drafter that learns in the real SGLang: as the only drafter, and beside EAGLE3.

It begins as a damaged copy of the shipped one, so that there is something to learn.
"""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from engine_shim.sglang.training.signals import Signal, SignalStore
from engine_shim.sglang.training.versions import FOLDER_NAME, Versions
from lab.cpu_engine.models.targets import load_target
from lab.harness.scripted_sidecar import Arm, ScriptedSidecar, scripted_sidecar
from tests.support.engine import (
    DFLASH,
    DFLASH_ONLY,
    EAGLE3,
    MODES,
    TARGET,
    EngineProcess,
    running_engine,
)
from tests.support.eventually import eventually
from tests.support.learning_engine import (
    check_features,
    run_until_heard,
    save_damaged_dflash,
    status,
    wait_for_status,
    wave,
)
from tests.support.long_contexts import EVERYTHING, agreement, recorder
from tests.support.prompts_in_flight import PLAYS_MAX, WAVES, play
from tests.support.rank_weights import check_served, load_trained, weights_variables
from tests.support.specforge_runs import PASSES, Run, train_runs
from tests.support.waits import WAITS
from trainer.checkpoint import load_dflash
from trainer.specforge import export_signals, import_draft

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

EMBEDDING = load_target(TARGET).model.embed_tokens.weight.detach()
GAMMA = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals") / "store"


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine lists what would wait for a device."""
    return tmp_path_factory.mktemp("waits") / "waits.json"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The damaged drafter."""
    draft_folder = tmp_path_factory.mktemp("draft")
    save_damaged_dflash(draft_folder, EMBEDDING)
    return draft_folder


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    return recorder(tmp_path_factory.mktemp("canvases"))


@pytest.fixture(scope="module")
def engine(
    plain_waves: list[list[list[int]]],
    draft: Path,
    folder: Path,
    recording: tuple[Path, dict[str, str]],
    waits: Path,
    sidecar: ScriptedSidecar,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    variables = {
        **sidecar.variables,
        **recording[1],
        "CPU_ENGINE_SYNCHRONISATIONS": str(waits),
        "SPECULATION_GAMMAS": "0,1,3,7",
        "SPECULATION_ONLINE_UPDATES": "1",
        "SPECULATION_SIGNALS_FOLDER": str(folder),
    }
    arguments = [str(draft) if part == str(DFLASH) else part for part in DFLASH_ONLY]
    with running_engine(tmp_path_factory.mktemp("learning"), arguments, variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


@pytest.mark.nightly
def test_in_long_contexts_a_student_of_the_whole_context_is_the_drafter(
    engine: EngineProcess,
    draft: Path,
    recording: tuple[Path, dict[str, str]],
    sidecar: ScriptedSidecar,
) -> None:
    student = load_dflash(draft, EMBEDDING)
    acceptance_share = agreement(engine, sidecar, recording[0], student, (48, 256, 512))
    print(f"DFlash, first drafts that agree by window: {acceptance_share}")
    assert acceptance_share[EVERYTHING] > 0.97
    assert acceptance_share[48] < acceptance_share[EVERYTHING]


@pytest.mark.nightly
def test_what_it_reads_is_collected_trains_in_specforge_and_the_version_serves(
    engine: EngineProcess,
    folder: Path,
    sidecar: ScriptedSidecar,
    plain_waves: list[list[list[int]]],
    tmp_path: Path,
) -> None:
    capabilities = sidecar.introductions[0].capabilities
    assert capabilities.can_collect
    assert capabilities.can_take_versions
    sidecar.collect = True
    run_until_heard(engine, sidecar, lambda _: (GAMMA, False))
    lengths = [wave(engine, number, plain_waves) for number in range(3)]
    sidecar.collect = False
    sidecar.run(lambda _: (GAMMA, False))
    wait_for_status(engine, "signals", "open", False)
    wait_for_status(engine, "signals", "waiting", 0)
    signals = [one for one in SignalStore(folder, 1 << 30).read() if len(one.tokens) > 100]
    assert len(signals) >= 10
    check_first_features(signals)
    versions = Versions(folder / FOLDER_NAME)
    out = tmp_path / "out"
    assert export_signals(folder, versions, 0, TARGET, out) >= 10
    run = Run(out, "hf", ("training.num_anchors=64", *PASSES))
    (logged,) = train_runs(run, kernel=False)
    print(f"SpecForge's loss {logged[0]['loss']:.2f}, then {logged[-1]['loss']:.2f}")
    number = import_draft(run.trained_folder, versions)
    sidecar.draft_version = number
    sidecar.run(lambda _: (GAMMA, False))
    wait_for_status(engine, "draft", "version", number)
    after = wave(engine, 3, plain_waves)
    print(f"acceptance length {lengths[-1]:.2f}, of the version {after:.2f}")
    assert after > max(lengths) + 0.4
    reports = sidecar.reports[-5:]
    assert {report.draft_version for report in reports} == {number}
    # Back to what was loaded.
    sidecar.draft_version = 0
    sidecar.run(lambda _: (GAMMA, False))
    wait_for_status(engine, "draft", "version", 0)
    assert wave(engine, 3, plain_waves) < after - 0.3


def check_first_features(signals: list[Signal]) -> None:
    """Those of a signal that begins with its prompt."""
    early_signal = next(signal for signal in signals if signal.start < 100)
    target, layers = load_target(TARGET), load_dflash(DFLASH, EMBEDDING).shape.feature_layers
    check_features(early_signal, layers)
    # Those of a whole prompt have seen all that came before them.
    prompts = [one for one in signals if not one.start and one.context > 40]
    for one in prompts:
        with torch.no_grad():
            _, features = target.logits_and_features(one.tokens[None], layers)
        read = slice(one.context)
        known, kept = torch.cat(features, dim=-1)[0][read], one.features[read].float()
        assert torch.nn.functional.cosine_similarity(known, kept, dim=-1).min() > 0.99
    assert prompts


def test_it_learns_while_it_serves_and_never_changes_a_token(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain_waves: list[list[list[int]]]
) -> None:
    assert sidecar.introductions[0].capabilities.can_update_online
    wait_for_status(engine, "online", "state", "ready")
    sidecar.run(lambda _: (GAMMA, False))
    before = wave(engine, 0, plain_waves)
    sidecar.stride = 2
    # A whole block occasionally, and nothing at all.
    arms = [(GAMMA, False)] * 6 + [(7, False), (0, True)]
    sidecar.run(lambda count: arms[count % 8])
    # The slower the machine, the fewer updates land in a wave.
    for number in range(1, PLAYS_MAX):
        wave(engine, number % len(WAVES), plain_waves)
        if number >= 3 and status(engine, "online")["updates"] > 30:
            break
    sidecar.stride = 0
    sidecar.run(lambda _: (GAMMA, False))
    after = wave(engine, 0, plain_waves)
    online_status = status(engine, "online")
    print(
        f"acceptance length {before:.2f}, then {after:.2f} after {online_status['updates']} updates"
    )
    assert online_status["updates"] > 20
    assert online_status["refused"] == 0
    assert after > before + 0.2


@pytest.mark.nightly
def test_neither_collecting_nor_a_version_waits_for_the_device(
    engine: EngineProcess, waits: Path
) -> None:
    """After all other tests of this engine; a nightly one collects, and takes versions."""
    assert status(engine, "draft")["deployed"] > 0
    assert set(json.loads(waits.read_text())) == WAITS.keys()


@dataclass(frozen=True)
class Beside:
    """An engine in which the damaged drafter learns beside EAGLE3, and its sidecar."""

    engine: EngineProcess
    sidecar: ScriptedSidecar
    folder: Path
    waits: Path

    def wave(self, number: int, drafter: int, plain_waves: list[list[list[int]]]) -> float:
        """The acceptance length where one drafter drafts all steps."""
        run_until_heard(self.engine, self.sidecar, lambda _: (GAMMA, False, drafter))
        return wave(self.engine, number, plain_waves)


@pytest.fixture(scope="module")
def eagle3_pair(
    plain_waves: list[list[list[int]]], draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beside]:
    """It runs its passes, and copies between host and device, as most GPUs do."""
    folder = tmp_path_factory.mktemp("signals-beside") / "store"
    waits = tmp_path_factory.mktemp("waits-beside") / "waits.json"
    with scripted_sidecar(tmp_path_factory.mktemp("sidecar-beside")) as scripted:
        variables = {
            **scripted.variables,
            **MODES["overlapped"],
            "CPU_ENGINE_LATE_COPIES": "3",
            "CPU_ENGINE_SYNCHRONISATIONS": str(waits),
            "SPECULATION_DFLASH_MODEL_PATH": str(draft),
            "SPECULATION_GAMMAS": "0,1,3,7",
            "SPECULATION_LEARNER": "dflash",
            "SPECULATION_ONLINE_UPDATES": "1",
            "SPECULATION_SIGNALS_FOLDER": str(folder),
            "SPECULATION_SLEEP_POSITIONS": "12",
        }
        with running_engine(tmp_path_factory.mktemp("beside"), EAGLE3, variables) as running:
            eventually(lambda: scripted.introductions, description="the engine introduces itself")
            yield Beside(running, scripted, folder, waits)


def test_beside_eagle3_what_it_reads_is_collected(
    eagle3_pair: Beside, plain_waves: list[list[list[int]]]
) -> None:
    capabilities = eagle3_pair.sidecar.introductions[0].capabilities
    assert capabilities.learner == "dflash"
    assert capabilities.can_update_online
    assert capabilities.can_take_versions
    eagle3_pair.sidecar.collect = True
    drafted = [eagle3_pair.wave(0, which, plain_waves) for which in (0, 1)]
    eagle3_pair.sidecar.collect = False
    eagle3_pair.sidecar.run(lambda _: (GAMMA, False, 0))
    wait_for_status(eagle3_pair.engine, "signals", "open", False)
    wait_for_status(eagle3_pair.engine, "signals", "waiting", 0)
    signals = [
        one for one in SignalStore(eagle3_pair.folder, 1 << 30).read() if len(one.tokens) > 90
    ]
    check_first_features(signals)
    assert drafted[0] > drafted[1] + 0.3
    # EAGLE3's drafts are no evidence about it.
    tried = [one.tried for one in signals]
    assert min(tried) == 0
    assert max(tried) > 0


def test_beside_eagle3_it_learns_and_eagle3_stays_as_it_is(
    eagle3_pair: Beside, plain_waves: list[list[list[int]]]
) -> None:
    wait_for_status(eagle3_pair.engine, "online", "state", "ready")
    before, untouched = (eagle3_pair.wave(0, which, plain_waves) for which in (1, 0))
    eagle3_pair.sidecar.stride = 2
    learner: Arm = (GAMMA, False, 1)
    arms: list[Arm] = [*[learner] * 5, (7, False, 1), (7, False, 0), (0, True, 0)]
    eagle3_pair.sidecar.run(lambda count: arms[count % 8])
    for number in range(1, PLAYS_MAX):
        wave(eagle3_pair.engine, number % len(WAVES), plain_waves)
        if number >= 3 and status(eagle3_pair.engine, "online")["updates"] > 30:
            break
    eagle3_pair.sidecar.stride = 0
    after, other = (eagle3_pair.wave(0, which, plain_waves) for which in (1, 0))
    online_status = status(eagle3_pair.engine, "online")
    print(
        f"acceptance length {before:.2f}, then {after:.2f} after {online_status['updates']} updates"
    )
    assert online_status["updates"] > 20
    assert online_status["refused"] == 0
    assert after > before + 0.2
    assert other == untouched


def test_beside_eagle3_nothing_waits_for_the_device(eagle3_pair: Beside) -> None:
    """Where copies are late as on a GPU, and after drafts were collected and learnt from."""
    assert status(eagle3_pair.engine, "online")["updates"] > 0
    assert json.loads(eagle3_pair.waits.read_text()) == {}


def test_beside_eagle3_a_killed_trainer_takes_nothing_with_it(
    eagle3_pair: Beside, plain_waves: list[list[list[int]]]
) -> None:
    family = psutil.Process(eagle3_pair.engine.process.pid).children(recursive=True)
    (trainer,) = [p for p in family if "engine_shim.sglang.training.trainer" in p.cmdline()]
    # What was not judged goes with the trainer: these drafts judge what was learnt last.
    for number in (1, 2):
        eagle3_pair.wave(number, 1, plain_waves)
    os.kill(trainer.pid, signal.SIGKILL)
    eagle3_pair.sidecar.stride = 1
    learnt, other = (eagle3_pair.wave(0, which, plain_waves) for which in (1, 0))
    assert status(eagle3_pair.engine, "online")["state"] == "the trainer has ended with status -9"
    assert learnt > 1.3
    assert other > learnt
    (loss,) = eagle3_pair.engine.internal_state()["speculation_controller"]["lost"]
    assert loss["capability"] == "CAPABILITY_UPDATE_ONLINE"


@pytest.mark.nightly
def test_over_two_ranks_each_request_learns_for_itself(draft: Path, tmp_path: Path) -> None:
    """It also begins with the drafter as loaded."""
    variables = {
        **weights_variables(tmp_path),
        **MODES["overlapped"],
        "SPECULATION_GAMMAS": "0,1,3,7",
        "SPECULATION_ONLINE_UPDATES": "1",
        "SPECULATION_ONLINE_SCOPE": "request",
    }
    arguments = [*DFLASH_ONLY[:-1], str(draft), "--tp-size", "2"]
    request = WAVES[0][:1], [200]
    with (
        scripted_sidecar(tmp_path) as sidecar,
        running_engine(tmp_path / "engine", arguments, variables | sidecar.variables) as engine,
    ):
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        (plain,), _ = play(engine, sidecar, lambda _: (0, False), *request)

        def acceptance_length() -> float:
            (answer,), _ = play(engine, sidecar, lambda _: (GAMMA, False), *request)
            assert answer.tokens == plain.tokens
            accepted: int = answer.meta["spec_num_correct_drafts"]
            steps: int = answer.meta["spec_verify_ct"]
            return 1 + accepted / steps

        wait_for_status(engine, "online", "state", "ready")
        before = acceptance_length()
        sidecar.stride = 1
        for _ in range(PLAYS_MAX):
            after = acceptance_length()
            online_status = status(engine, "online")
            if online_status["resets"] and after > before + 0.2:
                break
        print(f"acceptance length {before:.2f}, then {after:.2f} in one request")
        assert after > before + 0.2
        assert (online_status["refused"], online_status["restored"]) == (0, 0)
        assert online_status["resets"] > 0
        check_served(tmp_path, load_trained(tmp_path))
        sidecar.stride = 0
        run_until_heard(engine, sidecar, lambda _: (GAMMA, False))
        loaded = load_dflash(draft, EMBEDDING)
        check_served(tmp_path, dict(loaded.named_parameters()))
