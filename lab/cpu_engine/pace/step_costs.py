"""Prices every pass of an engine by a published table, a step-cost CSV or a profile.

What a table does not tell is derived from it, as this list says:

  prefill          a pass that reads n tokens of prompts costs plain decoding of one sequence, and
                   `prefill_seconds_per_token` for each of them; their attention costs nothing
  catching up      a drafter that slept pays one draft more than plain decoding at B = 1 (an upper
                   bound of one pass of it), and `catch_up_seconds_per_token` for what it missed
  the idle drafter `catch_up_seconds_per_token` for each token while the other one drafts
  gamma = 0 awake  WARM_FACTOR times plain decoding, as in `controller simulate`; asleep, plain
                   decoding
  padding          a batch is priced as the next larger batch that SGLang captures a graph for;
                   its context is that of its own sequences
  switching        SWITCH_SECONDS for a step that runs another arm than the one before it (assumed)
  a lookup         alone, the table's n-gram drafter; beside another drafter, LOOKUP_KERNELS
                   launches of LAUNCH_SECONDS (assumed), and LOOKUP_BYTES for each token that is
                   searched, at LOOKUP_BANDWIDTH.  A drafter that reads along while the lookup
                   drafts alone pays a pass, and `catch_up_seconds_per_token` for each token
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from controller.core.engine_spec import MAX_BATCH_SIZE, MAX_GAMMA, Arm
from controller.core.model_shapes import DrafterKind
from simulator import published
from simulator.errors import InvalidInputError
from simulator.step_costs import read_profile, read_step_costs
from simulator.surface import CostSurface, profile_surface, table_surface

# The drafters' names in the engine: SGLang's own one, and the second one beside it.
OWN, SECOND = "eagle3", "dflash"
LOOKUP = "ngram"
WARM_FACTOR = 1.05
SWITCH_SECONDS = 1e-4
# Of a lookup on the device (counted by test_lookup_in_a_graph.py).
LOOKUP_KERNELS = 33
LOOKUP_BYTES = 104
LAUNCH_SECONDS = 5e-6
LOOKUP_BANDWIDTH = 3.35e12
# The sizes that SGLang captures for speculation on a GPU (arg_groups/cuda_graph_hook.py).
GRAPH_BATCH_SIZES = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8))
_MAX_BATCH = 256
# A published table is asked for draft lengths up to this one, or up to its own longest.
_DEFAULT_GAMMA_MAX = 8

_ROLES: Mapping[DrafterKind, str] = {
    DrafterKind.MTP: OWN,
    DrafterKind.DFLASH: SECOND,
    DrafterKind.NGRAM: LOOKUP,
}
_SOURCES: Mapping[str, str] = {
    "h100-llama3.1-8b": "fit to vLLM 0.10.1, Llama-3.1-8B with EAGLE on one H100 "
    "(arXiv 2601.11580); batches above 64 are extrapolated, linearly",
    "b200-qwen3.6-35b-a3b": "roofline of Qwen3.6-35B-A3B with MTP and DFlash on a B200 (F. Finn, "
    '"Adaptive speculative decoding")',
    **{
        name: f"TIDE (arXiv 2602.05145), Table 5 with its D_0: {name.removeprefix('tide-')}"
        for name in published.surface_names()
        if name.startswith("tide-")
    },
}


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Holds the imposed duration of every pass of an engine, in seconds of the model's time.

    surface: decode steps of both drafters by their names in the engine, batches padded; the passes
    of a prefill and of a drafter that catches up.
    """

    name: str
    source: str
    surface: CostSurface
    switch_seconds: float = SWITCH_SECONDS
    warm_factor: float = WARM_FACTOR

    def decode_seconds(
        self, arm: Arm, batch_size: int, kv_tokens: int, *, warm: bool = False
    ) -> float:
        """Seconds of a decode step, without what a switch or a drafter's catching up adds.

        kv_tokens: context of all sequences.  warm: at gamma 0, whether the drafter is kept in step.
        Raises KeyError for an arm that has no price.
        """
        surface = self.surface
        if arm not in surface.arms:
            raise KeyError(f"{self.name} has no price for {arm}")
        row = surface.arms.index(arm)
        plain = float(surface.seconds[row, min(batch_size, surface.max_batch_size)])
        context = float(surface.kv_seconds[row])
        seconds = max(
            plain + context * (kv_tokens - batch_size * surface.kv_reference), 0.1 * plain
        )
        return seconds * self.warm_factor if warm and arm.gamma == 0 else seconds

    def lookup_seconds(self, searched: int) -> float:
        """Seconds that a lookup adds to another drafter's step.

        searched: tokens of all sequences, each counted as long as the longest one.
        """
        moved = LOOKUP_BYTES * searched / LOOKUP_BANDWIDTH
        return LOOKUP_KERNELS * LAUNCH_SECONDS + moved

    def reading_seconds(self, tokens: int) -> float:
        """Seconds in which a drafter that does not draft reads a step's tokens in a pass."""
        return self.surface.catch_up_seconds(tokens)

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds of a pass that reads this many tokens of prompts."""
        surface = self.surface
        return surface.prefill_pass_seconds + surface.prefill_seconds_per_token * tokens

    def catch_up_seconds(self, tokens: int) -> float:
        """Seconds in which the drafter reads what it slept through; 0 for no token."""
        return self.surface.catch_up_seconds(tokens)


def load_step_costs(
    table: str,
    gammas: Sequence[int] = (),
    max_batch_size: int = _MAX_BATCH,
    graph_batch_sizes: Sequence[int] = GRAPH_BATCH_SIZES,
    *,
    lookup: bool = False,
) -> StepCosts:
    """Loads the costs of a published name, of a step-cost CSV, or of a profile (a JSON file).

    gammas: the engine's draft lengths, to which 0 is added; none for all that the table has.  A
    drafter of serial passes plays the engine's own, a block drafter the second one.  lookup: an
    n-gram drafter plays the prompt lookup.

    Raises InvalidInputError: neither a name nor a readable file, a file without a draft length of
    the engine, no drafter that can play the engine's own or the lookup, a number out of range.
    """
    requested_gammas = tuple(sorted({0, *gammas}))
    if requested_gammas[0] < 0 or requested_gammas[-1] > MAX_GAMMA:
        raise InvalidInputError(
            table, 0, f"draft lengths {list(gammas)} must be in [0, {MAX_GAMMA}]"
        )
    if not 1 <= max_batch_size <= MAX_BATCH_SIZE:
        raise InvalidInputError(
            table, 0, f"max_batch_size {max_batch_size} must be in [1, {MAX_BATCH_SIZE}]"
        )
    if table in published.surface_names():
        source = _SOURCES[table]
        surface = _map_to_engine_drafters(
            _published_surface(table, requested_gammas[-1], max_batch_size), lookup
        )
    elif not Path(table).is_file():
        raise InvalidInputError(
            table, 0, f"is neither a file nor one of: {', '.join(published.surface_names())}"
        )
    else:
        file_surface, source = _read_surface(Path(table), max_batch_size)
        surface = _with_prefill(_map_to_engine_drafters(file_surface, lookup))
    if gammas:
        surface = _select_gammas(surface, requested_gammas)
    rows = {arm: i for i, arm in enumerate(surface.arms)}
    own_drafter = next(spec for spec in surface.drafters if spec.name == OWN)
    plain = float(surface.seconds[rows[Arm(OWN, 0)], 1])
    shortest = next((gamma for gamma in own_drafter.gammas if gamma > 0), 0)
    draft_step_seconds = float(surface.seconds[rows[Arm(OWN, shortest)], 1])
    # The context in the table belongs to decoding: a prefill pays for its own.
    context = float(surface.kv_seconds[rows[Arm(OWN, 0)]]) * surface.kv_reference
    priced = replace(
        _pad_batches(surface, graph_batch_sizes),
        prefill_pass_seconds=max(plain - context, 0.1 * plain),
        catch_up_pass_seconds=max(draft_step_seconds - plain, 0.0) / max(shortest, 1),
    )
    return StepCosts(surface.name, source, priced)


def padded_size(batch_size: int, graph_batch_sizes: Sequence[int] = GRAPH_BATCH_SIZES) -> int:
    """The batch that a graph replays for this one; beyond the largest graph it runs as it is."""
    return next((size for size in graph_batch_sizes if size >= batch_size), batch_size)


def _published_surface(name: str, deepest: int, max_batch_size: int) -> CostSurface:
    """Returns the published surface with draft lengths up to `deepest` for all drafters.

    SGLang prepares every draft length for both drafters, also where one has no use for it: a
    drafter's lengths beyond those known continue as its last two do.
    """
    known_gamma_max = max(d.gammas[-1] for d in published.published_surface(name).drafters)
    lengths = range(max(known_gamma_max, _DEFAULT_GAMMA_MAX) + 1)
    known_surface = published.published_surface(name, lengths, max_batch_size, extrapolate=True)
    rows, kv_rows, drafters = [], [], []
    for spec in known_surface.drafters:
        drafter_rows = [i for i, arm in enumerate(known_surface.arms) if arm.drafter == spec.name]
        deeper = range(spec.gammas[-1] + 1, deepest + 1)
        previous_seconds, last_seconds = (
            known_surface.seconds[drafter_rows[-2]],
            known_surface.seconds[drafter_rows[-1]],
        )
        extrapolated = [
            last_seconds + (last_seconds - previous_seconds) * (gamma - spec.gammas[-1])
            for gamma in deeper
        ]
        rows += [*known_surface.seconds[drafter_rows], *extrapolated]
        kv_rows += [
            *known_surface.kv_seconds[drafter_rows],
            *(known_surface.kv_seconds[drafter_rows[-1]] for _ in deeper),
        ]
        drafters.append(replace(spec, gammas=(*spec.gammas, *deeper)))
    return replace(
        known_surface,
        drafters=tuple(drafters),
        seconds=np.vstack(rows),
        kv_seconds=np.array(kv_rows),
    )


def _read_surface(path: Path, max_batch_size: int) -> tuple[CostSurface, str]:
    """Reads costs of a profile or a step-cost CSV; returns them and a sentence on the source."""
    if path.suffix != ".json":
        tables = {OWN: read_step_costs(path)}
        return table_surface(path.stem, tables, max_batch_size=max_batch_size), (
            f"step costs {path.name}"
        )
    profile = read_profile(path)
    kinds = {
        d.name: DrafterKind.DFLASH if SECOND in d.name.lower() else DrafterKind.MTP
        for d in profile.drafters
    }
    device = profile.fingerprint.device or "an unnamed device"
    return (
        profile_surface(path.stem, profile, kinds, max_batch_size),
        f"profile {path.name}, measured on {device}",
    )


def _select_gammas(surface: CostSurface, gammas: Sequence[int]) -> CostSurface:
    """Returns the rows of these draft lengths.

    Raises InvalidInputError for one that is missing; a block drafter needs only those that its
    block can fill.
    """
    for drafter in surface.drafters:
        needed = [
            gamma
            for gamma in gammas
            if drafter.kind is not DrafterKind.DFLASH or gamma <= drafter.gammas[-1]
        ]
        missing = sorted(set(needed) - set(drafter.gammas))
        if missing:
            raise InvalidInputError(
                surface.name, 0,
                f"the table of {drafter.name} has the draft lengths {list(drafter.gammas)}, and "
                f"the engine {missing} as well",
            )  # fmt: skip
    keep = [i for i, arm in enumerate(surface.arms) if arm.gamma in gammas]
    return replace(
        surface,
        drafters=tuple(
            replace(d, gammas=tuple(g for g in d.gammas if g in gammas)) for d in surface.drafters
        ),
        seconds=surface.seconds[keep],
        kv_seconds=surface.kv_seconds[keep],
    )


def _with_prefill(surface: CostSurface) -> CostSurface:
    """Prices a prompt's token as one more token in the largest verification of the table."""
    rows = [i for i, arm in enumerate(surface.arms) if arm.drafter == OWN]
    deepest = surface.arms[rows[-1]].gamma
    size = surface.max_batch_size
    added = float(surface.seconds[rows[-1], size] - surface.seconds[rows[0], size])
    per_token = max(added, 0.0) / (deepest * size) if deepest else 0.0
    return replace(surface, prefill_seconds_per_token=per_token)


def _map_to_engine_drafters(surface: CostSurface, lookup: bool) -> CostSurface:
    """Gives the drafters their names in the engine, and leaves out those that it does not run.

    Raises InvalidInputError where no drafter can play the engine's own, or the lookup.
    """
    names: dict[str, str] = {}
    for spec in surface.drafters:
        role = _ROLES.get(spec.kind)
        if role == LOOKUP and not lookup:
            continue
        if role is not None and role not in names.values():
            names[spec.name] = role
    if lookup and LOOKUP not in names.values():
        raise InvalidInputError(surface.name, 0, "has no n-gram drafter")
    if OWN not in names.values():
        raise InvalidInputError(surface.name, 0, "has no drafter that drafts in serial passes")
    keep = [i for i, arm in enumerate(surface.arms) if arm.drafter in names]
    return replace(
        surface,
        drafters=tuple(replace(d, name=names[d.name]) for d in surface.drafters if d.name in names),
        seconds=surface.seconds[keep],
        kv_seconds=surface.kv_seconds[keep],
    )


def _pad_batches(surface: CostSurface, graph_batch_sizes: Sequence[int]) -> CostSurface:
    """Prices every batch as the graph that it is padded to; padding has no context."""
    largest = surface.max_batch_size
    sizes = np.arange(largest + 1)
    padded = np.array([min(padded_size(max(int(n), 1), graph_batch_sizes), largest) for n in sizes])
    context = surface.kv_seconds[:, None] * surface.kv_reference * (padded - np.maximum(sizes, 1))
    return replace(surface, seconds=surface.seconds[:, padded] - context)
