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
from engine_shim.sglang.drafters.drafting import OptionalPart, build_verification, fits_draft_worker
from engine_shim.sglang.drafters.lookup import Proposal, TokenHistory, device_bytes
from engine_shim.sglang.drafters.row_choice import RowChoice, RowProposals
from engine_shim.sglang.drafters.row_counts import Role, count_compared, count_rows
from engine_shim.sglang.memory import MIB
from speculation.v1.engine_pb2 import StepReport
from speculation.v1.plan_pb2 import MixtureRule

# The attribute of a step's result that holds its counts.
_OUTCOME_ATTRIBUTE: Final = "speculation_rows"
# Index of the engine's own drafter.
_OWN_DRAFTER_INDEX: Final = 0

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
    return next((reason for reason, applies in obstacles.items() if applies), None)


class RowDrafting(OptionalPart):
    """Drafts with a lookup, and chooses the drafter of each row; one object per engine.

    roles: role of each drafter, in the order of the engine's description.  lookup_index: index of
    the lookup in it.  ended_drafter_names: of the lookup and the mixtures.
    """

    def __init__(self, worker: Any, roles: Mapping[str, Role]) -> None:
        """Allocates the token buffer for all requests.  Raises UnsupportedEngineError."""
        if (reason := cannot_look_up_reason()) is not None:
            raise UnsupportedEngineError(f"SPECULATION_LOOKUP: {reason}")
        pool = worker.req_to_token_pool.req_to_token
        super().__init__("prompt lookup no longer drafts; the engine's own drafter does")
        self.roles = tuple(roles.values())
        self._drafter_names = tuple(roles)
        self.lookup_index = self.roles.index(Role(None, is_mixed=False))
        self._mixtures: Mapping[int, int] = {
            role.main: index
            for index, role in enumerate(self.roles)
            if role.is_mixed and role.main is not None
        }
        self._history = TokenHistory(
            pool.shape[0],
            pool.shape[1] + sglang_api.max_step_tokens(),
            worker.target_worker.model_runner.model_config.vocab_size,
            pool.device,
        )
        self._choice = RowChoice(pool.shape[0], pool.device)
        self._row_proposals: RowProposals | None = None
        # Upper bound of the position of each row's newest token.
        self._newest_bounds: Sequence[int] = ()
        _log.info(
            "prompt lookup keeps %.1f MiB of tokens, and takes %.1f MiB with its searches",
            self._history.device_bytes / MIB,
            device_bytes(pool.shape[0], self._history.width) / MIB,
        )

    @property
    def ended_drafter_names(self) -> tuple[str, ...]:
        """Returns the names of the drafters that need it: the lookup and all mixtures."""
        return tuple(self._drafter_names[i] for i in (self.lookup_index, *self._mixtures.values()))

    def drafts_alone(self, index: int) -> bool:
        """Whether the drafter with this index is the lookup, which then drafts alone."""
        return index == self.lookup_index and not self.failure_reason

    def mixture_name(self, main: str) -> str:
        """Returns the name of a drafter's mixture; "" if it has none."""
        index = (
            self._mixtures.get(self._drafter_names.index(main))
            if main in self._drafter_names
            else None
        )
        return "" if index is None else self._drafter_names[index]

    def before_prefill(self, batch: Any) -> None:
        """Reads the prompts of a prefill."""
        self._choice.reset_rows(self._history.read_prompt(batch.reqs))

    def before_decode(self, batch: Any, unknown_tokens: int) -> None:
        """Prepares for a decode step.

        unknown_tokens: the most tokens that the previous step has added to a request, if the
        scheduler has not read them back.
        """
        self._row_proposals = None
        self._choice.reset_rows(self._history.read_running(batch.reqs))
        if batch.seq_lens_cpu is not None:
            self._newest_bounds = batch.seq_lens_cpu.tolist()
        else:
            self._newest_bounds = [r.kv.kv_committed_len + unknown_tokens for r in batch.reqs]

    def compare_first_tokens(self, batch: Any, draft: Any) -> None:
        """Compares, in a step at gamma 0, the first token that each drafter would propose.

        draft: the `EagleDraftWorker` (or its replacement), which reads the tokens of each step.
        """
        draft_input = batch.spec_info
        if draft_input is None or not hasattr(draft_input, "topk_index"):
            return
        first_tokens = None
        if sglang_api.dflash_only_drafter(draft) is None:
            first_tokens = draft_input.topk_index[:, :1]
            if draft.hot_token_id is not None:
                first_tokens = draft.hot_token_id[first_tokens]
        lookup = self._propose(batch, 1)
        self._row_proposals = RowProposals(
            batch.req_pool_indices,
            1,
            first_tokens,
            lookup,
            None,
            None,
            is_mixed=False,
            is_verified=False,
        )

    def draft_alone(self, draft: Any, batch: Any) -> Any | None:
        """Returns the verification of the lookup's tokens; None if another drafter must draft."""
        if not fits_draft_worker(draft, batch):
            return None
        gamma = draft.speculative_num_steps
        lookup = self._propose(batch, gamma)
        self._row_proposals = RowProposals(
            batch.req_pool_indices, gamma, None, lookup, None, None, is_mixed=False
        )
        return build_verification(draft, batch, lookup.tokens)

    def add_lookup(self, verify: Any, batch: Any, role: Role, rules: Sequence[MixtureRule]) -> None:
        """Adds the lookup's proposals to the drafts in `verify`; mixes them in a mixed role."""
        assert role.main is not None
        batch_size = batch.seq_lens.shape[0]
        draft_tokens = verify.draft_token.view(batch_size, -1)
        gamma = draft_tokens.shape[1] - 1
        lookup = self._propose(batch, gamma)
        rule = None
        if (mixture := self._mixtures.get(role.main)) is not None:
            rule = self._choice.find_rule(rules, self._drafter_names[mixture], gamma)
        tokens, self._row_proposals = self._choice.choose(
            batch.req_pool_indices, draft_tokens[:, 1:], lookup, rule, is_mixed=role.is_mixed
        )
        if self._row_proposals.is_mixed:
            mixed = torch.cat((draft_tokens[:, :1], tokens.to(draft_tokens.dtype)), dim=1)
            verify.draft_token = mixed.view_as(verify.draft_token)

    def _propose(self, batch: Any, gamma: int) -> Proposal:
        rows, lengths = batch.req_pool_indices, batch.seq_lens
        # The newest token is not in the cache yet, so its position is the length of the cache.
        self._history.add(rows, lengths, batch.spec_info.bonus_tokens.view(-1, 1))
        return self._history.propose(rows, lengths, gamma, self._newest_bounds)

    def after_verify(self, batch: Any, result: Any, *, reports: bool) -> None:
        """Reads what a step has verified.  reports: whether to store the counts on the result."""
        batch_size = batch.seq_lens.shape[0]
        verified = result.next_token_ids.view(batch_size, -1)
        self._history.add(batch.req_pool_indices, batch.seq_lens + 1, verified)
        proposals, self._row_proposals = self._row_proposals, None
        if proposals is not None:
            outcome = self._choice.observe(proposals, verified, result.accept_lens)
            if reports:
                setattr(result, _OUTCOME_ATTRIBUTE, outcome)

    def add_counts(
        self,
        report: StepReport,
        result: Any,
        accepted: Sequence[int],
        excluded_rows: Collection[int],
        cut_row_tokens: Mapping[int, int],
        drafter_index: int,
    ) -> None:
        """Adds the counts of the rows of a step, whose result is on the CPU, to its report.

        At gamma 0 these are the compared first tokens.

        excluded_rows: rows that are left out.  cut_row_tokens: tokens that the answers took, for
        rows that were cut at the end of an answer.  drafter_index: of the drafter that ran.
        """
        outcome_cpu = getattr(result, _OUTCOME_ATTRIBUTE, None)
        if outcome_cpu is None:
            return
        if excluded_rows:
            rows = [row for row in range(len(accepted)) if row not in excluded_rows]
            outcome_cpu = outcome_cpu.numpy()[rows]
            accepted = [accepted[row] for row in rows]
            cut_row_tokens = {
                new_row: cut_row_tokens[row]
                for new_row, row in enumerate(rows)
                if row in cut_row_tokens
            }
        names = self._drafter_names
        if report.gamma == 0:
            count_compared(report, outcome_cpu, names[_OWN_DRAFTER_INDEX], names[self.lookup_index])
            return
        role = self.roles[drafter_index]
        mixture = None if role.main is None else self._mixtures.get(role.main)
        count_rows(
            report, outcome_cpu, accepted, role, self.lookup_index, mixture, names, cut_row_tokens
        )

    def main_drafter_index(self, index: int) -> int:
        """Returns the index of the drafter that a step uses without mixing."""
        main = self.roles[index].main
        return self.lookup_index if main is None else main

    def around_copy(
        self, original: Callable[..., None], result: Any, *arguments: Any, **named: Any
    ) -> None:
        """Copies a step's counts with its other results (wraps `copy_to_cpu` of the result)."""
        outcome = getattr(result, _OUTCOME_ATTRIBUTE, None)
        if outcome is not None:
            setattr(
                result, _OUTCOME_ATTRIBUTE, self.attempt(lambda: sglang_api.copy_to_host(outcome))
            )
        original(result, *arguments, **named)
