"""An EAGLE3 drafter of 768 of the target's 1,024 tokens, as most published ones are, in service.

It is the shipped drafter that has seen code only, less rows of its head, so that there is something
to learn.  Some of the tokens that it lacks are among those that the target says most often.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine_shim.sglang.training.chain import Eagle3Student
from engine_shim.sglang.training.signals import Signal, SignalStore
from engine_shim.sglang.training.versions import FOLDER_NAME, Versions
from lab.cpu_engine.models.targets import load_target
from lab.harness.scripted_sidecar import ScriptedSidecar
from tests.support.engine import CODE_ONLY, TARGET, EngineProcess, running_engine
from tests.support.eventually import eventually
from tests.support.learning_engine import run_until_heard, status, wait_for_status, wave
from tests.support.prompts_in_flight import PLAYS_MAX, WAVES
from tests.support.specforge_runs import PASSES, Run, train_runs
from tests.support.training_rounds import with_draft_vocabulary
from trainer.adapt import acceptance_rate, served_acceptance
from trainer.checkpoint import load_eagle3, save_eagle3
from trainer.specforge import export_signals, import_draft

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

EMBEDDING = load_target(TARGET).model.embed_tokens.weight.detach()
TOKENS, DRAFTS = 1024, 768
GAMMA = 3


@pytest.fixture(scope="module")
def vocabulary(plain: dict[str, list[list[int]]]) -> torch.Tensor:
    """The ids that can be drafted: the likeliest ones, but for every eighth of them."""
    counts = Counter(chain(*plain["waves"]))
    ranked = sorted(range(TOKENS), key=lambda token: -counts[token])
    kept = [token for rank, token in enumerate(ranked) if rank % 8 != 3]
    return torch.tensor(sorted(kept[:DRAFTS]))


@pytest.fixture(scope="module")
def draft(vocabulary: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    save_eagle3(
        with_draft_vocabulary(load_eagle3(Path(CODE_ONLY[-1]), EMBEDDING), vocabulary), folder
    )
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["draft_vocab_size"]) == (TOKENS, DRAFTS)
    stored = load_file(folder / "model.safetensors")
    # SGLang's convention: the target's id is the draft's id plus d2t.
    assert torch.equal(stored["d2t"] + torch.arange(DRAFTS), vocabulary)
    assert torch.equal(stored["t2d"].nonzero().flatten(), vocabulary)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals") / "store"


@pytest.fixture(scope="module")
def engine(
    plain_waves: list[list[list[int]]],
    draft: Path,
    folder: Path,
    sidecar: ScriptedSidecar,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    variables = {
        **sidecar.variables,
        "SPECULATION_GAMMAS": "0,1,3",
        "SPECULATION_ONLINE_UPDATES": "1",
        "SPECULATION_SIGNALS_FOLDER": str(folder),
        "SPECULATION_SIGNALS_FINAL_STATES": "1",
    }
    arguments = (*CODE_ONLY[:-1], str(draft))
    with running_engine(tmp_path_factory.mktemp("vocabulary"), arguments, variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def test_it_serves_exactly_with_every_draft_length(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain_waves: list[list[list[int]]]
) -> None:
    capabilities = sidecar.introductions[0].capabilities
    assert capabilities.can_update_online
    assert capabilities.can_collect
    assert capabilities.can_take_versions
    assert not sidecar.introductions[0].lost
    arms = [(GAMMA, False), (0, True), (1, False), (0, False)]
    sidecar.run(lambda count: arms[count // 4 % 4])
    assert wave(engine, 0, plain_waves) > 1


@pytest.mark.nightly
def test_what_is_collected_trains_in_specforge_and_its_drafter_serves(
    engine: EngineProcess,
    draft: Path,
    folder: Path,
    sidecar: ScriptedSidecar,
    plain_waves: list[list[list[int]]],
    vocabulary: torch.Tensor,
    tmp_path: Path,
) -> None:
    sidecar.collect = True
    run_until_heard(engine, sidecar, lambda _: (GAMMA, False))
    lengths = [wave(engine, number, plain_waves) for number in range(3)]
    sidecar.collect = False
    sidecar.run(lambda _: (GAMMA, False))
    wait_for_status(engine, "signals", "open", value=False)
    wait_for_status(engine, "signals", "waiting", 0)
    signals = [one for one in SignalStore(folder, 1 << 30).read() if len(one.tokens) > 100]
    assert len(signals) >= 10
    versions = Versions(folder / FOLDER_NAME)
    student = versions.load_student(0)
    assert isinstance(student, Eagle3Student)
    assert student.tokens is not None
    assert torch.equal(student.tokens, vocabulary)
    check_student(student, signals)

    out = tmp_path / "out"
    assert export_signals(folder, versions, 0, TARGET, out) >= 10
    exported, served = (
        load_file(model_folder / "model.safetensors") for model_folder in (out / "draft", draft)
    )
    assert exported.keys() == served.keys()
    for name, part in served.items():
        assert torch.equal(exported[name], part), name

    run = Run(out, "sglang", ("training.ttt_length=3", *PASSES))
    (logged,) = train_runs(run, kernel=False)
    print(f"SpecForge's loss {logged[0]['loss']:.2f}, then {logged[-1]['loss']:.2f}")
    number = import_draft(run.trained_folder, versions)
    sidecar.draft_version = number
    sidecar.run(lambda _: (GAMMA, False))
    wait_for_status(engine, "draft", "version", number)
    after = wave(engine, 3, plain_waves)
    print(f"acceptance length {lengths[-1]:.2f}, of the version {after:.2f}")
    assert after > max(lengths) + 0.3
    # Back to what was loaded.
    sidecar.draft_version = 0
    sidecar.run(lambda _: (GAMMA, False))
    wait_for_status(engine, "draft", "version", 0)
    assert wave(engine, 3, plain_waves) < after - 0.2


def check_student(student: Eagle3Student, signals: list[Signal]) -> None:
    """It accepts what the engine's drafter did: it is the same drafter, with the same tokens."""
    served = served_acceptance(signals)
    assert served is not None
    ours = acceptance_rate(student, signals, GAMMA)
    print(f"acceptance rate {served:.3f} in service, {ours:.3f} of the student")
    assert ours == pytest.approx(served, abs=0.02)


def test_it_learns_what_it_serves(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain_waves: list[list[list[int]]]
) -> None:
    wait_for_status(engine, "online", "state", "ready")
    sidecar.run(lambda _: (GAMMA, False))
    before = wave(engine, 0, plain_waves)
    sidecar.stride = 3
    sidecar.run(lambda _: (GAMMA, False))
    # The slower the machine, the fewer updates land in a wave.
    for number in range(1, PLAYS_MAX):
        after = wave(engine, number % len(WAVES), plain_waves)
        online_status = status(engine, "online")
        if number >= len(WAVES) - 1 and online_status["updates"] > 20 and after > before + 0.4:
            break
    print(
        f"acceptance length {before:.2f}, then {after:.2f} after {online_status['updates']} updates"
    )
    assert online_status["updates"] > 20
    assert online_status["refused"] == 0
    assert after > before + 0.4
