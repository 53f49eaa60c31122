"""One real SGLang over two ranks, with two drafters, steered by one scripted sidecar.

Its own drafter knows code only, and the second one is damaged.  The former learns where passes
overlap, by versions and online, the latter where they do not.
"""

import os
import random
import re
import signal
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch

from engine_shim.sglang.training.signals import Signal, SignalStore
from engine_shim.sglang.training.versions import FOLDER_NAME, VersionOrigin, Versions
from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts
from lab.cpu_engine.models.targets import load_target
from lab.cpu_engine.serve import with_cpu_defaults
from lab.harness.scripted_sidecar import Arm, ScriptedSidecar, scripted_sidecar
from tests.support.engine import (
    CODE_ONLY,
    DRAFT,
    EAGER_NIGHTLY,
    EAGLE3,
    MODES,
    TARGET,
    EngineProcess,
    install_plugin,
    running_engine,
    started_engine,
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
from tests.support.mixture_rules import rules_of
from tests.support.prompts_in_flight import PLAYS_MAX, WAVE_LENGTH, WAVES, sleep_counts
from tests.support.rank_weights import (
    check_served,
    is_same,
    join_ranks,
    load_trained,
    weights_variables,
)
from trainer.checkpoint import load_eagle3

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TWO_RANKS = ("--tp-size", "2")
GAMMAS = (0, 1, 3, 7)
ARMS: list[Arm] = [
    *((gamma, False, 0) for gamma in GAMMAS),
    *((gamma, False, 1) for gamma in GAMMAS[1:]),
    *((gamma, False, which) for which in (2, 3, 4) for gamma in (3, 7)),
    (0, True, 0),
]
# A lookup, alone and in a mixture with each drafter.
LOOKUPS = ("ngram", "eagle3+ngram", "dflash+ngram")
PROMPTS = [
    prompt
    for domain in DOMAINS
    for prompt in held_out_prompts(domain, count=1, length_tokens=40, seed=3)
]
LENGTHS = [25, 45, 35, 30][: len(PROMPTS)]
LONG = [WAVE_LENGTH] * len(WAVES[0])
# The number of waves that are played here.
WAVES_PLAYED = 2
# The drafter that knows all domains, as a version of the one that knows code only.
EMBEDDING = load_target(TARGET).model.embed_tokens.weight.detach()
BETTER = {name: p.detach() for name, p in load_eagle3(DRAFT, EMBEDDING).named_parameters()}
ORIGIN = VersionOrigin(0, 0.0, 1.0, 0.0, 12, 1.0)
# By way: the drafter that learns, its place, and by how much its acceptance length is to rise.
LEARNERS = {"eager": ("dflash", 1, 0.2), "overlapped": ("eagle3", 0, 0.5)}


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """Of two ranks as well: a sum over two rounds otherwise than one over all."""
    asked = [(PROMPTS, LENGTHS)]
    asked += [(prompts, [WAVE_LENGTH] * len(prompts)) for prompts in WAVES[:WAVES_PLAYED]]
    with running_engine(tmp_path_factory.mktemp("plain"), TWO_RANKS) as engine:
        return [[answer.tokens for answer in engine.generate(*part)] for part in asked]


@pytest.fixture(scope="module")
def plain(decoded: list[list[list[int]]]) -> list[list[int]]:
    """Plain decoding's tokens of all prompts."""
    return decoded[0]


@pytest.fixture(scope="module")
def plain_waves(decoded: list[list[list[int]]]) -> list[list[list[int]]]:
    """Those by wave."""
    return decoded[1:]


@pytest.fixture(scope="module")
def served(way: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each rank leaves the weights that it serves."""
    return tmp_path_factory.mktemp(f"served-{way}")


@pytest.fixture(scope="module", params=["eager", "overlapped"])
def way(request: pytest.FixtureRequest) -> str:
    """How an engine runs its passes: the first of `MODES`, and the last."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def learner(way: str) -> Arm:
    """The arm in which the drafter that learns drafts."""
    return 3, False, LEARNERS[way][1]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A DFlash drafter and its parameters."""
    folder = tmp_path_factory.mktemp("damaged")
    return folder, save_damaged_dflash(folder, EMBEDDING)


@pytest.fixture(scope="module")
def sidecar(way: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedSidecar]:
    """One for each way's engine."""
    with scripted_sidecar(tmp_path_factory.mktemp(f"sidecar-{way}")) as scripted:
        scripted.rules = rules_of(LOOKUPS[1:], GAMMAS)
        yield scripted


@pytest.fixture(scope="module")
def engine(
    way: str,
    plain: list[list[int]],
    sidecar: ScriptedSidecar,
    damaged: tuple[Path, dict[str, torch.Tensor]],
    served: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    """Every second broadcast of SGLang is left out."""
    variables = {
        **sidecar.variables,
        **weights_variables(served),
        "SPECULATION_SIGNALS_FOLDER": str(served / "signals"),
        "SPECULATION_ONLINE_UPDATES": "1",
        "SPECULATION_LEARNER": LEARNERS[way][0],
        **MODES[way],
        "SPECULATION_DFLASH_MODEL_PATH": str(damaged[0]),
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_LOOKUP": "1",
        "SPECULATION_SLEEP_POSITIONS": "8",
        "SPECULATION_GRACE_SECONDS": "0.6",
    }
    arguments = [*CODE_ONLY, *TWO_RANKS, "--scheduler-recv-interval", "2"]
    with running_engine(tmp_path_factory.mktemp("steered"), arguments, variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def test_it_introduces_itself_once(
    way: str, engine: EngineProcess, sidecar: ScriptedSidecar
) -> None:
    assert len(sidecar.introductions) == 1
    spec = sidecar.introductions[0]
    assert spec.fingerprint.tensor_parallel_size == 2
    assert list(spec.fingerprint.graph_batch_sizes) == ([] if way == "eager" else [1, 2, 4, 8])
    # The whole model, not one rank's share of it.
    full = spec.shape.attention[0].grouped_query
    assert (full.query_heads, full.kv_heads) == (4, 2)
    assert engine.log.read_text().count("steered by") == 1


def test_ranks_run_the_same_arm_in_every_step(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: list[list[int]]
) -> None:
    """Two ranks that ran different arms would hang, or sum what does not belong together."""
    order = random.Random(5)
    arms = order.choices(ARMS, k=5000)
    before = sidecar.run(lambda count: arms[count % 5000])
    every = {("eagle3", gamma) for gamma in GAMMAS} | {("dflash", gamma) for gamma in GAMMAS[1:]}
    every |= {(name, gamma) for name in LOOKUPS for gamma in (3, 7)}
    rows = 0
    # On a busy machine a plan comes for every few steps only.
    for _ in range(20):
        answers = engine.generate(PROMPTS, LENGTHS)
        assert [answer.tokens for answer in answers] == plain
        rows += sum(answer.meta["spec_verify_ct"] for answer in answers)
        reports = sidecar.reports_since(before, rows)
        ran = {(report.drafter, report.gamma) for report in reports}
        switches = sum(report.flags.switched for report in reports)
        slept = sleep_counts(engine)["slept"]
        if ran >= every and switches > 30 and slept:
            break
    assert ran >= every
    assert switches > 30
    assert not any(report.flags.eager_fallback for report in reports)
    assert slept > 0


@pytest.mark.parametrize("way", ["eager"], indirect=True)
def test_a_plan_runs_out_on_all_ranks_at_once(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: list[list[int]]
) -> None:
    planned, own = ("dflash", 7), ("eagle3", 3)
    answer, sidecar.answer = sidecar.answer, lambda _: None
    sidecar.lease_ms = 300
    try:
        before = sidecar.run(lambda _: (7, False, 1))
        rows = 0
        # On a busy machine the first step may come when the plan has long run out.
        for _ in range(PLAYS_MAX):
            (answered,) = engine.generate(PROMPTS[:1], [150])
            assert answered.tokens[: LENGTHS[0]] == plain[0]
            rows += answered.meta["spec_verify_ct"]
            reports = sidecar.reports_since(before, rows, count_lost=True)
            ran = [(report.drafter, report.gamma) for report in reports if report.flags.unsteered]
            if (planned, own) in pairwise(ran):
                break
    finally:
        sidecar.lease_ms = 60_000
        sidecar.answer = answer
    # The last plan lasts for the grace, and then the engine runs alone; until the agent, which
    # hears nothing, begins a new session, with a plan, and so on.
    assert (planned, own) in pairwise(ran)
    assert set(ran) == {planned, own}


@pytest.mark.parametrize("way", ["overlapped"], indirect=True)
def test_a_version_is_served_by_all_ranks_or_by_none(
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    served: Path,
    plain_waves: list[list[list[int]]],
) -> None:
    capabilities = sidecar.introductions[0].capabilities
    assert capabilities.can_collect
    assert capabilities.can_take_versions
    versions = Versions(served / "signals" / FOLDER_NAME)
    # What rank 0 has left of both is the checkpoint.
    loaded = dict(versions.load_student(0).named_parameters())
    for name, part in load_eagle3(Path(CODE_ONLY[-1]), EMBEDDING).named_parameters():
        assert torch.equal(loaded[name], part), name
    sidecar.collect = True
    run_until_heard(engine, sidecar, lambda _: (3, False))
    before = wave(engine, 0, plain_waves)
    sidecar.collect = False
    # Rank 1 cannot read this one.
    (served / "unreadable").touch()
    sidecar.draft_version = versions.publish(BETTER, ORIGIN)
    sidecar.run(lambda _: (3, False))
    state = f"version {sidecar.draft_version} cannot be used: rank 1: sabotaged"
    wait_for_status(engine, "draft", "state", state)
    assert status(engine, "draft")["version"] == 0
    assert not (served / "rank0.pt").exists()
    (served / "unreadable").unlink()
    sidecar.draft_version = versions.publish(BETTER, ORIGIN)
    sidecar.run(lambda _: (3, False))
    wait_for_status(engine, "draft", "version", sidecar.draft_version)
    check_served(served, BETTER)
    after = wave(engine, 1, plain_waves)
    print(f"acceptance length {before:.2f}, of the version {after:.2f}")
    assert after > before + 1
    sidecar.draft_version = 0
    sidecar.run(lambda _: (3, False))
    wait_for_status(engine, "draft", "version", 0)
    check_served(served, loaded)
    assert status(engine, "draft")["deployed"] == 2
    wait_for_status(engine, "signals", "waiting", 0)
    check_signals(list(SignalStore(served / "signals", 1 << 30).read()))


def check_signals(signals: list[Signal]) -> None:
    """Rank 0's hidden states and logits are the whole model's, not its share."""
    longest_signal = max(signals, key=lambda signal: len(signal.tokens))
    assert len(longest_signal.tokens) > 80
    check_features(longest_signal, load_eagle3(DRAFT, EMBEDDING).shape.feature_layers)
    # The prompt, with which a signal may begin, was not written by the target.
    following = longest_signal.tokens[longest_signal.context + 1 :]
    assert torch.equal(longest_signal.top_tokens[:-1, 0].long(), following)


@pytest.mark.parametrize("way", [EAGER_NIGHTLY, "overlapped"], indirect=True)
def test_an_update_lands_on_all_ranks_in_the_same_step(
    way: str,
    learner: Arm,
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    served: Path,
    plain_waves: list[list[list[int]]],
) -> None:
    capabilities = sidecar.introductions[0].capabilities
    assert capabilities.can_update_online
    assert capabilities.learner == (LEARNERS[way][0] if LEARNERS[way][1] else "")
    sidecar.run(lambda _: learner)
    wait_for_status(engine, "online", "state", "ready")
    # The versions of another test, if it has run.
    replaced = status(engine, "online")["replaced"]
    before = wave(engine, 0, plain_waves)
    sidecar.stride = 2
    sidecar.run(lambda _: learner)
    for number in range(1, PLAYS_MAX):
        after = wave(engine, number % WAVES_PLAYED, plain_waves)
        updates = status(engine, "online")["updates"]
        if updates > 20 and after > before + LEARNERS[way][2]:
            break
    print(f"acceptance length {before:.2f}, then {after:.2f} after {updates} updates")
    assert updates > 20
    assert after > before + LEARNERS[way][2]
    online_status = status(engine, "online")
    assert (online_status["refused"], online_status["replaced"]) == (0, replaced)
    # Nothing more is learnt: both ranks together serve what the trainer has made.
    sidecar.stride = 0
    run_until_heard(engine, sidecar, lambda _: learner)

    def rests() -> bool:
        # Too short to have the guard judge.
        engine.generate(WAVES[0][:1], [4])
        now = status(engine, "online")
        return bool(now["updates"] == now["rounds"])

    eventually(rests, description="the last update has landed")
    check_served(served, load_trained(served))


@pytest.mark.parametrize("way", ["eager"], indirect=True)
def test_a_round_that_is_not_finite_changes_neither_rank(
    learner: Arm,
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    served: Path,
    plain_waves: list[list[list[int]]],
) -> None:
    wait_for_status(engine, "online", "state", "ready")
    online_status = status(engine, "online")
    written = {path: path.stat().st_mtime_ns for path in served.glob("rank*.pt")}
    sidecar.stride = 1
    (served / "not_finite").touch()
    sidecar.run(lambda _: learner)

    def so(name: str) -> bool:
        wave(engine, 0, plain_waves)
        return bool(status(engine, "online")[name] > online_status[name])

    eventually(lambda: so("refused"), description="a round is refused")
    assert status(engine, "online")["updates"] == online_status["updates"]
    assert {path: path.stat().st_mtime_ns for path in served.glob("rank*.pt")} == written
    (served / "not_finite").unlink()
    eventually(lambda: so("updates"), description="it learns on")


@pytest.mark.parametrize("way", ["eager"], indirect=True)
def test_updates_that_do_harm_are_taken_back_on_both_ranks(
    learner: Arm,
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    damaged: tuple[Path, dict[str, torch.Tensor]],
    served: Path,
    plain_waves: list[list[list[int]]],
) -> None:
    def good() -> Mapping[str, torch.Tensor]:
        return join_ranks(served, "good") if (served / "good0.pt").exists() else damaged[1]

    def judged() -> bool:
        wave(engine, 0, plain_waves)
        return is_same(join_ranks(served), good())

    sidecar.stride = 0
    run_until_heard(engine, sidecar, lambda _: learner)
    eventually(
        judged, timeout_seconds=240.0, description="what was learnt is good, or has been taken back"
    )
    before, restored = wave(engine, 1, plain_waves), status(engine, "online")["restored"]
    sidecar.stride = 1
    (served / "ruined").touch()
    sidecar.run(lambda _: learner)

    def taken_back() -> bool:
        wave(engine, 0, plain_waves)
        return bool(status(engine, "online")["restored"] > restored)

    eventually(taken_back, timeout_seconds=240.0, description="the last good weights are back")
    (served / "ruined").unlink()
    sidecar.stride = 0
    run_until_heard(engine, sidecar, lambda _: learner)
    # It may have begun to learn again, from what was ruined, before it heard.
    eventually(judged, timeout_seconds=240.0, description="both ranks serve what is good")
    after = wave(engine, 1, plain_waves)
    print(f"acceptance length {before:.2f}, after the harm was taken back {after:.2f}")
    assert after > before - 0.3


@pytest.mark.parametrize("way", ["overlapped"], indirect=True)
def test_a_new_target_is_noticed_on_all_ranks(
    learner: Arm, engine: EngineProcess, sidecar: ScriptedSidecar, served: Path
) -> None:
    """Its embedding, which the drafter reads, and which is its head as well."""
    before = status(engine, "online")
    noise = torch.randn(EMBEDDING.shape, generator=torch.Generator().manual_seed(4))
    other = EMBEDDING + 0.05 * EMBEDDING.std() * noise
    engine.replace_target({"model.embed_tokens.weight": other}, ranks=2)
    sidecar.stride = 0
    sidecar.run(lambda _: (0, False))
    tokens = [answer.tokens for answer in engine.generate(WAVES[0], LONG)]
    sidecar.stride = 1
    sidecar.run(lambda _: learner)

    def learns_on() -> bool:
        wave(engine, 0, [tokens])
        now = status(engine, "online")
        is_told = now["replaced"] == before["replaced"] + 1
        return bool(is_told and now["updates"] > before["updates"])

    eventually(learns_on, description="it is noticed, and learning continues")
    (borrowed,) = torch.load(served / "borrowed0.pt").values()
    assert torch.equal(borrowed, other)
    engine.replace_target({"model.embed_tokens.weight": EMBEDDING}, ranks=2)


@pytest.mark.parametrize("way", ["overlapped"], indirect=True)
def test_when_the_trainer_has_gone_all_ranks_serve_the_last_good_weights(
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    served: Path,
    plain_waves: list[list[list[int]]],
) -> None:
    updates = status(engine, "online")["updates"]
    sidecar.stride = 1
    sidecar.run(lambda _: (3, False))

    def has_learnt() -> bool:
        wave(engine, 0, plain_waves)
        return bool(status(engine, "online")["updates"] > updates)

    eventually(has_learnt, description="it learns")
    family = psutil.Process(engine.process.pid).children(recursive=True)
    (trainer,) = [p for p in family if "engine_shim.sglang.training.trainer" in p.cmdline()]
    os.kill(trainer.pid, signal.SIGKILL)
    wait_for_status(engine, "online", "state", "the trainer has ended with status -9")
    wave(engine, 1, plain_waves)
    # What was not judged yet is taken back.
    last = [
        load_trained(served),
        *([join_ranks(served, "good")] if (served / "good0.pt").exists() else []),
    ]
    joined_status = join_ranks(served)
    assert any(all(torch.equal(joined_status[n], part) for n, part in one.items()) for one in last)
    assert engine.log.read_text().count("the drafter is no longer updated") == 1


def test_ranks_that_were_set_up_differently_do_not_start(tmp_path: Path) -> None:
    target = "tests.system.engine.sabotage:let_one_rank_differ"
    plugins = install_plugin(tmp_path / "sabotage", target, name="zz_sabotage")
    variables = {
        "SPECULATION_SIDECAR": "unix:/nowhere",
        "SPECULATION_GAMMAS": "0,1,2,3,5,7",
        "FIRST_RANK": str(tmp_path / "first"),
        "PYTHONPATH": str(plugins),
    }
    arguments = with_cpu_defaults([*EAGLE3, *TWO_RANKS])
    # Its ranks are spawned, as on a GPU: a forked one could not have other variables.
    with started_engine(
        tmp_path / "engine", arguments, variables, "sglang.launch_server"
    ) as engine:
        eventually(
            lambda: engine.process.poll() is not None,
            timeout_seconds=500.0,
            description="it gives up",
        )
        log = engine.log.read_text()
    assert re.search(r"the ranks disagree: SPECULATION_GAMMAS is \(0, 1, .*7\) on rank 0", log)
