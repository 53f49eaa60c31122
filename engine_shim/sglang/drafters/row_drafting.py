"""A prompt lookup beside an engine's drafters: alone, or in mixtures that choose row by row.

The lookup runs in every step that drafts, so that each step measures its acceptance.  All of its
work is launched on the device after the drafter's.  Only its counts return to the host, together
with the result that SGLang copies anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.api import sglang_api
from engine_shim.sglang.drafters.drafting import Attempts, fits, verification_of
from engine_shim.sglang.drafters.lookup import Proposal, TokenHistory, device_bytes
from engine_shim.sglang.drafters.row_choice import Drafted, RowChoice
from engine_shim.sglang.drafters.row_counts import Role, count_rows, count_watched
from engine_shim.sglang.memory import MIB
from speculation.v1.engine_pb2 import StepReport
from speculation.v1.plan_pb2 import MixtureRule

# The attribute of a step's result that holds its counts.
_OUTCOME: Final = "speculation_rows"
# Index of the engine's own drafter.
_OWN: Final = 0

_log = logging.getLogger(__name__)


def cannot_look_up_reason() -> str | None:
    """Explains why no lookup can draft in this engine; None if one can."""
    obstacles = {
        "--speculative-use-rejection-sampling needs the distribution it drafts from": (
            sglang_api.config_leaf("speculative_use_rejection_sampling")
        ),
        "--enable-mixed-chunk decodes inside prefill batches": sglang_api.config_leaf(
            "enable_mixed_chunk"
        ),
    }
    return next((reason for reason, is_so in obstacles.items() if is_so), None)


class RowDrafting(Attempts):
    """Drafts with a lookup, and chooses the drafter of each row; one object per engine.

    roles: role of each drafter, in the order of the engine's description.  lookup: index of the
    lookup in it.  names: of the lookup and the mixtures.
    """

    def __init__(self, worker: Any, roles: Mapping[str, Role]) -> None:
        """Allocates the token buffer for all requests.  Raises UnsupportedEngineError."""
        if (reason := cannot_look_up_reason()) is not None:
            raise UnsupportedEngineError(f"SPECULATION_LOOKUP: {reason}")
        pool = worker.req_to_token_pool.req_to_token
        super().__init__("prompt lookup no longer drafts; the engine's own drafter does")
        self.roles = tuple(roles.values())
        self._all_names = tuple(roles)
        self.lookup = self.roles.index(Role(None, is_mixed=False))
        self._mixtures: Mapping[int, int] = {
            role.main: index
            for index, role in enumerate(self.roles)
            if role.is_mixed and role.main is not None
        }
        self._history = TokenHistory(
            pool.shape[0],
            pool.shape[1] + sglang_api.widest_step(),
            worker.target_worker.model_runner.model_config.vocab_size,
            pool.device,
        )
        self._choice = RowChoice(pool.shape[0], pool.device)
        self._drafted: Drafted | None = None
        # Upper bound of the position of each row's newest token.
        self._furthest: Sequence[int] = ()
        _log.info(
            "prompt lookup keeps %.1f MiB of tokens, and takes %.1f MiB with its searches",
            self._history.bytes / MIB,
            device_bytes(pool.shape[0], self._history.width) / MIB,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the drafters that need it: the lookup and all mixtures."""
        return tuple(self._all_names[i] for i in (self.lookup, *self._mixtures.values()))

    def is_alone(self, index: int) -> bool:
        """Whether the drafter with this index is the lookup, which then drafts alone."""
        return index == self.lookup and not self.over

    def mixture_of(self, main: str) -> str:
        """Returns the name of a drafter's mixture; "" if it has none."""
        index = self._mixtures.get(self._all_names.index(main)) if main in self._all_names else None
        return "" if index is None else self._all_names[index]

    def before_prefill(self, batch: Any) -> None:
        """Reads the prompts of a prefill."""
        self._choice.forget(self._history.read_prompt(batch.reqs))

    def before_decode(self, batch: Any, unread_tokens: int) -> None:
        """Prepares for a decode step.

        unread_tokens: the most tokens that the previous step has added to a request, if the
        scheduler has not read them back.
        """
        self._drafted = None
        self._choice.forget(self._history.meet(batch.reqs))
        if batch.seq_lens_cpu is not None:
            self._furthest = batch.seq_lens_cpu.tolist()
        else:
            self._furthest = [r.kv.kv_committed_len + unread_tokens for r in batch.reqs]

    def watch(self, batch: Any, draft: Any) -> None:
        """Compares, in a step at gamma 0, the first token that each drafter would propose.

        draft: the `EagleDraftWorker` (or its replacement), which reads the tokens of each step.
        """
        known = batch.spec_info
        if known is None or not hasattr(known, "topk_index"):
            return
        first = None
        if sglang_api.dflash_only(draft) is None:
            first = known.topk_index[:, :1]
            if draft.hot_token_id is not None:
                first = draft.hot_token_id[first]
        free = self._propose(batch, 1)
        self._drafted = Drafted(
            batch.req_pool_indices, 1, first, free, None, None, is_mixed=False, is_verified=False
        )

    def draft_alone(self, draft: Any, batch: Any) -> Any | None:
        """Returns the verification of the lookup's tokens; None if another drafter must draft."""
        if not fits(draft, batch):
            return None
        gamma = draft.speculative_num_steps
        free = self._propose(batch, gamma)
        self._drafted = Drafted(
            batch.req_pool_indices, gamma, None, free, None, None, is_mixed=False
        )
        return verification_of(draft, batch, free.tokens)

    def join(self, verify: Any, batch: Any, role: Role, rules: Sequence[MixtureRule]) -> None:
        """Adds the lookup's proposals to the drafts in `verify`; mixes them in a mixed role."""
        assert role.main is not None
        size = batch.seq_lens.shape[0]
        canvas = verify.draft_token.view(size, -1)
        gamma = canvas.shape[1] - 1
        free = self._propose(batch, gamma)
        rule = None
        if (mixture := self._mixtures.get(role.main)) is not None:
            rule = self._choice.rule(rules, self._all_names[mixture], gamma)
        tokens, self._drafted = self._choice.choose(
            batch.req_pool_indices, canvas[:, 1:], free, rule, is_mixed=role.is_mixed
        )
        if self._drafted.is_mixed:
            mixed = torch.cat((canvas[:, :1], tokens.to(canvas.dtype)), dim=1)
            verify.draft_token = mixed.view_as(verify.draft_token)

    def _propose(self, batch: Any, gamma: int) -> Proposal:
        rows, lengths = batch.req_pool_indices, batch.seq_lens
        # The newest token is not in the cache yet, so its position is the length of the cache.
        self._history.add(rows, lengths, batch.spec_info.bonus_tokens.view(-1, 1))
        return self._history.propose(rows, lengths, gamma, self._furthest)

    def after_verify(self, batch: Any, result: Any, *, reports: bool) -> None:
        """Reads what a step has verified.  reports: whether to store the counts on the result."""
        size = batch.seq_lens.shape[0]
        verified = result.next_token_ids.view(size, -1)
        self._history.add(batch.req_pool_indices, batch.seq_lens + 1, verified)
        drafted, self._drafted = self._drafted, None
        if drafted is not None:
            outcome = self._choice.learn(drafted, verified, result.accept_lens)
            if reports:
                setattr(result, _OUTCOME, outcome)

    def count(
        self,
        report: StepReport,
        result: Any,
        accepted: Sequence[int],
        left: Collection[int],
        kept: Mapping[int, int],
        index: int,
    ) -> None:
        """Adds the counts of the rows of a step, whose result is on the CPU, to its report.

        At gamma 0 these are the compared first tokens.

        left: rows that are left out.  kept: tokens that the answers took, for rows that were cut at
        the end of an answer.  index: of the drafter that ran.
        """
        outcome_cpu = getattr(result, _OUTCOME, None)
        if outcome_cpu is None:
            return
        if left:
            rows = [row for row in range(len(accepted)) if row not in left]
            outcome_cpu = outcome_cpu.numpy()[rows]
            accepted = [accepted[row] for row in rows]
            kept = {place: kept[row] for place, row in enumerate(rows) if row in kept}
        names = self._all_names
        if report.gamma == 0:
            count_watched(report, outcome_cpu, names[_OWN], names[self.lookup])
            return
        role = self.roles[index]
        mixture = None if role.main is None else self._mixtures.get(role.main)
        count_rows(report, outcome_cpu, accepted, role, self.lookup, mixture, names, kept)

    def verified_by(self, index: int) -> int:
        """Returns the index of the drafter that a step uses without mixing."""
        main = self.roles[index].main
        return self.lookup if main is None else main

    def around_copy(
        self, original: Callable[..., None], result: Any, *arguments: Any, **named: Any
    ) -> None:
        """Copies a step's counts with its other results (wraps `copy_to_cpu` of the result)."""
        outcome = getattr(result, _OUTCOME, None)
        if outcome is not None:
            setattr(result, _OUTCOME, self.attempt(lambda: sglang_api.copy_to_host(outcome)))
        original(result, *arguments, **named)
