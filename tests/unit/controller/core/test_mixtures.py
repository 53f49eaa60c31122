"""A mixture of two drafters: learnt from what steps show, chosen where it pays, and explained."""

import random

import pytest

from controller.core.clock import VirtualClock
from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, DrafterSpec, EngineSpec, Fingerprint, Mixture
from controller.core.model_shapes import DrafterKind
from controller.core.plan import PlanRow, Probe
from controller.core.settings import PlannerSettings
from controller.core.step_report import ProposalCounts, RowGroup, StepReport
from controller.wire.explanations import explain, explanation_to_proto
from tests.support.virtual_engine import Acceptance, VirtualEngine

GAMMAS = (0, 1, 2, 4, 6)
BATCH = 8
NAMES = ("eagle3", "ngram", "eagle3+ngram")


def seconds(drafter: str, gamma: int) -> float:
    """A look-up costs nothing, a pass of the other drafter a twentieth of a step."""
    passes = gamma if drafter != "ngram" else 0
    return 0.01 + 0.0005 * passes + 2e-5 * BATCH * (gamma + 1)


class Row:
    """One request: it copies for a while, then writes for a while."""

    def __init__(self, rng: random.Random, copies: float) -> None:
        self.rng, self.copies = rng, copies
        self.left, self.is_copy = 0, False

    def draws(self) -> tuple[int, int, int]:
        """Tokens that each drafter's proposal would be accepted for, and the match length."""
        rng = self.rng
        if self.left <= 0:
            self.is_copy, self.left = rng.random() < self.copies, rng.randint(10, 40)
        if self.is_copy:
            return run(rng, 0.6), run(rng, 0.97), 5
        matches = rng.random() < 0.5
        return run(rng, 0.7), run(rng, 0.2) if matches else 0, 2 if matches else 0


def run(rng: random.Random, p: float) -> int:
    n = 0
    while n < 8 and rng.random() < p:
        n += 1
    return n


class MixingEngine(VirtualEngine):
    """Decodes rows that copy and write; reports what each drafter gave or would have given."""

    def __init__(self, copies: float, *, probes: bool = True) -> None:
        spec = EngineSpec(
            "e",
            Fingerprint("target"),
            (
                DrafterSpec("eagle3", DrafterKind.MTP, GAMMAS),
                DrafterSpec("ngram", DrafterKind.NGRAM, GAMMAS[1:]),
                DrafterSpec(
                    "eagle3+ngram",
                    DrafterKind.MIXTURE,
                    GAMMAS[1:],
                    mixture=Mixture("eagle3", "ngram"),
                ),
            ),
            BATCH,
        )
        arms = [(a.drafter, a.gamma) for a in spec.arms]
        cells = tuple(ProfileCell(d, g, BATCH, seconds(d, g), 0.0, 20) for d, g in arms)
        identities = tuple(DrafterIdentity(name) for name in NAMES)
        profile = Profile(spec.fingerprint, identities, 0.0, 0.0, cells)
        clock = VirtualClock()
        settings = PlannerSettings(probe_share=0.009 if probes else 0.0)
        core = EngineController(spec, settings, profile, clock)
        super().__init__(core, clock, rng=random.Random(3), context=500)
        self.rows = [Row(self.rng, copies) for _ in range(BATCH)]
        self.steps_by: dict[str, int] = dict.fromkeys(NAMES, 0)

    def uses_lookup(self, gamma: int, match: int) -> bool:
        for rule in self.plan.rules:
            if rule.arm.gamma == gamma and match >= rule.least_match:
                expected = rule.free_expected[min(match - rule.least_match, 3)]
                return expected > rule.main_expected
        return False

    def next_probe(self, row: PlanRow) -> Probe | None:
        return row.probe

    def decode(self, arm: Arm, batch_size: int, acceptance: Acceptance) -> StepReport:
        gamma = arm.gamma
        groups = {name: [0] * (gamma + 1) for name in NAMES[:2]}
        shown: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        for request in self.rows:
            main, free, match = request.draws()
            used = {"eagle3": "eagle3", "ngram": "ngram"}.get(arm.drafter) or (
                "ngram" if self.uses_lookup(gamma, match) else "eagle3"
            )
            accepted = min(free if used == "ngram" else main, gamma)
            groups[used][accepted] += 1
            request.left -= accepted + 1
            if gamma:
                drafted = [("ngram", match, free)]
                if arm.drafter != "ngram":
                    drafted.append(("eagle3", 0, main))
                if arm.drafter == "eagle3":
                    other = free if self.uses_lookup(gamma, match) else main
                    drafted = [("ngram", match, free), ("eagle3+ngram", 0, other)]
                for name, length, whole in drafted:
                    exact, censored = shown.setdefault(
                        (name, length), ([0] * (gamma + 1), [0] * gamma)
                    )
                    would = min(whole, gamma)
                    if would <= accepted or accepted == gamma:
                        exact[would] += 1
                    elif accepted + 1 == gamma:
                        exact[gamma] += 1
                    else:
                        censored[accepted + 1] += 1
        counts = tuple(map(sum, zip(*groups.values(), strict=True)))
        self.steps_by[arm.drafter] += 1
        took = seconds(arm.drafter, gamma) * self.rng.lognormvariate(0, 0.02)
        self.clock.advance(took)
        return self.report(
            arm, counts, took,
            groups=tuple(RowGroup(name, gamma, tuple(n)) for name, n in groups.items() if any(n))
            if arm.drafter == "eagle3+ngram" else (),
            proposals=tuple(
                ProposalCounts(name, length, tuple(exact), tuple(censored))
                for (name, length), (exact, censored) in shown.items()
            ),
        )  # fmt: skip


def test_a_mixture_is_found_without_a_probe_where_rows_differ():
    engine = MixingEngine(0.5, probes=False)
    engine.run(1500, BATCH)
    before = dict(engine.steps_by)
    engine.run(500, BATCH)
    assert engine.steps_by["eagle3+ngram"] - before["eagle3+ngram"] >= 490
    assert engine.core.explorer.probe_count == 0


def test_what_idle_drafters_would_have_given_is_learnt_without_running_them():
    engine = MixingEngine(0.0, probes=False)
    engine.run(600, BATCH)
    assert engine.steps_by["ngram"] < 5
    first = next(
        p for p in explain(engine.core).positions if (p.drafter, p.position) == ("ngram", 1)
    )
    assert first.exposures > 500
    # It finds a match in every second row, of which a fifth is accepted.
    assert first.conditional_acceptance == pytest.approx(0.1, abs=0.04)


@pytest.mark.parametrize(("copies", "best"), [(0.0, "eagle3"), (1.0, "ngram")])
def test_where_all_rows_are_alike_one_drafter_runs(copies, best):
    engine = MixingEngine(copies)
    engine.run(1500, BATCH)
    before = dict(engine.steps_by)
    engine.run(500, BATCH)
    ran = {name: n - before[name] for name, n in engine.steps_by.items()}
    # Where look-up never pays, a mixture does what its main drafter does.
    same = ran[best] + (ran["eagle3+ngram"] if best == "eagle3" else 0)
    assert same >= 470


def test_rules_tell_match_lengths_apart_and_are_sent_again_only_when_they_move():
    engine = MixingEngine(0.5)
    engine.run(1500, BATCH)
    rule = engine.core.current_plan().rules[-1]
    assert rule.free_expected[3] > 1.5 * rule.main_expected
    assert rule.free_expected[0] < 0.5 * rule.main_expected
    before = engine.core.current_plan().epoch
    engine.run(300, BATCH)
    # Mostly renewed leases, and not a plan for every decision.
    assert engine.core.current_plan().epoch - before < 25


def test_how_a_mixture_is_used_is_explained():
    engine = MixingEngine(0.5)
    engine.run(2000, BATCH)
    (use,) = explanation_to_proto(explain(engine.core)).mixtures
    assert use.drafter == "eagle3+ngram"
    assert 0.2 < use.free_share < 0.7
    assert use.gained > 1


def test_a_lookup_that_drafts_less_than_its_mixture_promises_no_more_than_its_longest_draft():
    spec = EngineSpec(
        "e",
        Fingerprint("target"),
        (
            DrafterSpec("eagle3", DrafterKind.MTP, GAMMAS),
            DrafterSpec("ngram", DrafterKind.NGRAM, (1, 2)),
            DrafterSpec("both", DrafterKind.MIXTURE, (2, 6), mixture=Mixture("eagle3", "ngram")),
        ),
        BATCH,
    )
    core = EngineController(spec, PlannerSettings(), None, VirtualClock())
    short, long = core.current_plan().rules
    assert long.free_expected == short.free_expected
    assert long.main_expected > short.main_expected
