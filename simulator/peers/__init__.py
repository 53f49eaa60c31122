"""Policies of other projects, with which the simulation compares the controller."""

from collections.abc import Callable, Sequence
from functools import partial

from controller.core.cost.profile import Profile
from controller.core.engine_spec import MAX_BATCH_SIZE, Arm
from simulator.peers.bandit_ucb import UcbBandit
from simulator.peers.common import first_drafter, speculating_arm
from simulator.peers.full_information import FullInformationChoice
from simulator.peers.hill_climber import GoodputProbe, HillClimber
from simulator.peers.sglang_adaptive import SGLangAdaptive
from simulator.peers.tide import TideThreshold
from simulator.peers.trtllm_gate import THRESHOLD, SpeculationGate, break_even_rate
from simulator.peers.vllm import AdaptiveK, BatchSchedule, Table
from simulator.policy import Policy

PeerFactory = Callable[[], Policy]

# The draft length of TIDE's evaluation, for peers with one fixed length and a table without any.
_USUAL_GAMMA = 3
# Shifts are followed over some 500 steps of a batch octave; the plain bandit takes many thousands.
_BANDIT_DISCOUNT = 1 - 1 / 500


def standard_peers(
    arms: Sequence[Arm], profile: Profile | None, table: Table
) -> dict[str, PeerFactory]:
    """Name -> factory of every peer with its usual settings; each call makes a fresh object.

    table: the schedule of `vllm-schedule`, see `best_table`; the gate takes its draft lengths.
    Peers that cannot switch drafters take the one of the arm that the table speculates with most
    often, and peers with one fixed draft length take that arm's.  profile: costs; without them
    `tide` and `full-information` are left out, and two others do with their own constants.
    `full-information` needs two drafters.  The factory of `sglang-adaptive` raises
    PeerUnavailableError where SGLang is not installed.
    """
    arms = tuple(arms)
    speculating = [arm for _, _, arm in table if arms[arm].gamma > 0]
    usual_arms = speculating or [speculating_arm(arms, first_drafter(arms), _USUAL_GAMMA)]
    fixed_arm = arms[max(sorted(set(usual_arms)), key=usual_arms.count)]
    peers: dict[str, PeerFactory] = {
        "sglang-adaptive": partial(SGLangAdaptive, arms),
        "vllm-schedule": partial(BatchSchedule, arms, table),
        "vllm-adaptive-k": partial(AdaptiveK, arms, profile, drafter=fixed_arm.drafter),
        "trtllm-gate": partial(_make_gate, arms, table, profile, fixed_arm.drafter),
        "hill-climber": partial(HillClimber, arms),
        "goodput-probe": partial(GoodputProbe, arms),
        "bandit-ucb": partial(UcbBandit, arms, discount=_BANDIT_DISCOUNT),
    }
    if profile is not None:
        peers["tide"] = partial(
            TideThreshold, arms, profile, fixed_arm.gamma, drafter=fixed_arm.drafter
        )
        if len({arm.drafter for arm in arms}) > 1:
            peers["full-information"] = partial(FullInformationChoice, arms, profile)
    return peers


def _make_gate(
    arms: Sequence[Arm], table: Table, profile: Profile | None, drafter: str
) -> SpeculationGate:
    """The gate beside the table's draft lengths, closing where they cannot pay."""
    # What lies between two ranges of the table, and past its end, belongs to the range below.
    table = tuple(sorted(table))
    last_sizes = (*(first - 1 for first, _, _ in table[1:]), MAX_BATCH_SIZE)
    schedule = [
        (last, arms[arm].gamma) for last, (_, _, arm) in zip(last_sizes, table, strict=True)
    ]
    threshold = THRESHOLD
    if profile is not None:
        threshold = break_even_rate(arms, schedule, profile, drafter)
    return SpeculationGate(arms, schedule, drafter=drafter, threshold=threshold)
