"""Runs SGLang's `--speculative-adaptive`: its own class, imported unmodified.

`AdaptiveSpeculativeParams` (sglang.srt.speculative.adaptive_spec_params) holds, per batch-size
slot, an average of accepted drafts and a list of candidate steps through which thresholds on that
average move.  Here it gets what its worker gives it: the batch size before a step, and after it the
accepted drafts of every request (rebuilt from the step's counts: its average does not see order).

What it runs with: the configuration that the installed package ships.  A candidate that the engine
has no arm for is taken out through the package's own configuration file; a slot that would lose
all its positive candidates gets the nearest draft lengths instead.  It starts at 3 steps, or the
nearest.  It cannot switch drafters and uses the first one.  At 0 steps the drafter stays awake,
as SGLang does unless SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND is set: it leaves 0 every few batches,
and a drafter that slept would come back stale each time.

Before the first batch, the worker's `init_states` hands the class the batch sizes that CUDA graphs
were captured for; from then on a batch belongs to the slot of the size that it is padded to, which
at 31 and at 61 to 63 sequences is the next slot.  The same is done here, with the sizes that SGLang
captures by default when it speculates.  (0.5.23 passes on `--cuda-graph-bs-decode`, so a server
that was started without this option does not pad: `graph_sizes=()`.)

The import brings torch and some 3,000 modules: about 4 s and 430 MB, once in a process, and not
before the first object is made.
"""

import importlib
import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

from controller.core.engine_spec import Arm
from controller.core.errors import SpeculationError
from simulator.peers.common import arms_by_gamma, first_drafter, nearest_gamma
from simulator.policy import ArmChoice, StepRecord
from simulator.results import PolicyOrigin

NAME = "sglang-adaptive"
INITIAL_STEPS = 3
# As `generate_decode_cuda_graph_batch_sizes` lists them for an H100, up to 256.
GRAPH_SIZES = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8))
_MODULE_NAME = "sglang.srt.speculative.adaptive_spec_params"


class PeerUnavailableError(SpeculationError):
    """The package of a peer, which `peer` names, cannot be imported."""

    def __init__(self, peer: str, fault: str, remedy: str) -> None:
        self.peer = peer
        super().__init__(f"peer {peer!r} is not available: {fault}; {remedy}")


class SGLangAdaptive:
    """The installed SGLang's adaptive steps over the first drafter's arms.

    graph_sizes: batch sizes with captured graphs; empty: batches are not padded.  warm: at 0 steps,
    keep the drafter awake.  Raises PeerUnavailableError without SGLang.
    """

    origin = PolicyOrigin.IMPORTED

    def __init__(
        self,
        arms: Sequence[Arm],
        initial_steps: int = INITIAL_STEPS,
        *,
        graph_sizes: Sequence[int] = GRAPH_SIZES,
        warm: bool = True,
    ) -> None:
        index = arms_by_gamma(arms, first_drafter(arms))
        self._choices = {gamma: ArmChoice(i, asleep=not warm) for gamma, i in index.items()}
        # Any: the package has no types, see the configuration of mypy.
        self.params: Any = _make_params(tuple(index), nearest_gamma(list(index), initial_steps))
        self.params.set_cuda_graph_bs(list(graph_sizes))
        self._steps_for_batch = self.params.get_steps_for_batch

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Returns the arm of the steps that the slot of this batch, padded, stands at."""
        return self._choices[self._steps_for_batch(batch_size)]

    def observe(self, record: StepRecord, _: float) -> None:
        """Passes on one verify result, as the worker hands it over."""
        accepted: list[int] = []
        for length, sequences in enumerate(record.counts):
            if sequences:
                accepted.extend(repeat(length, sequences))
        self.params.on_verify_complete(accepted, record.batch_size)


def available_config(
    default: Mapping[str, Mapping[str, Any]], gammas: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """The default slots with candidate steps that exist, all else as it is."""
    config = {}
    for slot, entry in default.items():
        steps = _available_steps(entry["candidate_steps"], gammas)
        config[slot] = {**entry, "candidate_steps": steps}
    return config


def _available_steps(candidates: Sequence[int], gammas: Sequence[int]) -> list[int]:
    positive = [gamma for gamma in gammas if gamma > 0]
    positive_candidates = [steps for steps in candidates if steps > 0]
    available = {steps for steps in positive_candidates if steps in positive}
    if not available and positive:
        available = {nearest_gamma(positive, steps) for steps in positive_candidates}
    if 0 in candidates and 0 in gammas:
        available.add(0)
    return sorted(available or {nearest_gamma(gammas, steps) for steps in candidates})


def _make_params(gammas: Sequence[int], initial_steps: int) -> Any:
    module = _import_module()
    default = module.DEFAULT_ADAPTIVE_CONFIG
    config = available_config(default, gammas)
    if config == default:
        return module.AdaptiveSpeculativeParams(initial_steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adaptive.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        return module.AdaptiveSpeculativeParams(initial_steps, cfg_path=str(path))


def _import_module() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(_MODULE_NAME)
    except (ImportError, OSError) as error:  # OSError: a library of torch or the kernels is missing
        raise PeerUnavailableError(
            NAME,
            f"importing {_MODULE_NAME} failed ({error})",
            "install SGLang, 0.5.23 or newer, into this environment: `pip install sglang`",
        ) from error
