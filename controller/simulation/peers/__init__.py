"""Implements every other way of choosing a draft length that the simulation compares with."""

from collections.abc import Callable, Sequence
from functools import partial

from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm
from controller.simulation.peers.bandit_ucb import UcbBandit
from controller.simulation.peers.common import first_drafter, speculating_arm
from controller.simulation.peers.goodput_probe import GoodputProbe
from controller.simulation.peers.hill_climber import HillClimber
from controller.simulation.peers.sglang_adaptive import SGLangAdaptive
from controller.simulation.peers.tide import TideThreshold
from controller.simulation.peers.trtllm_gate import SpeculationGate
from controller.simulation.peers.vllm_schedule import BatchSchedule, Table
from controller.simulation.policy import Policy

PeerFactory = Callable[[], Policy]

# The draft length of TIDE's evaluation, for peers with one fixed length and a table without any.
_USUAL_GAMMA = 3
# Shifts are followed over some 500 steps of a batch octave; the plain bandit takes many thousands.
_BANDIT_DISCOUNT = 1 - 1 / 500


def standard_peers(
    arms: Sequence[Arm], profile: Profile | None, table: Table
) -> dict[str, PeerFactory]:
    """Name -> factory of every peer with its usual settings; each call makes a fresh object.

    table: the schedule of `vllm-schedule`, see `best_table`.  Peers with one fixed arm take the one
    that the table speculates with most often, and the gate speculates up to the largest batch at
    which the table does.  `tide` needs costs: without a profile it is left out.  The factory of
    `sglang-adaptive` raises PeerUnavailableError where SGLang is not installed.
    """
    arms = tuple(arms)
    speculating = [(last, arm) for _, last, arm in table if arms[arm].gamma > 0]
    usual = [arm for _, arm in speculating] or [
        speculating_arm(arms, first_drafter(arms), _USUAL_GAMMA)
    ]
    fixed = arms[max(sorted(set(usual)), key=usual.count)]
    # None when the table never switches speculation off above some batch size.
    largest = max((last for last, _ in speculating), default=0)
    limit = None if arms[table[-1][2]].gamma > 0 else largest
    peers: dict[str, PeerFactory] = {
        "sglang-adaptive": partial(SGLangAdaptive, arms),
        "vllm-schedule": partial(BatchSchedule, arms, table),
        "trtllm-gate": partial(SpeculationGate, arms, fixed.gamma, limit, drafter=fixed.drafter),
        "hill-climber": partial(HillClimber, arms),
        "goodput-probe": partial(GoodputProbe, arms),
        "bandit-ucb": partial(UcbBandit, arms, discount=_BANDIT_DISCOUNT),
    }
    if profile is not None:
        peers["tide"] = partial(TideThreshold, arms, profile, fixed.gamma, drafter=fixed.drafter)
    return peers
