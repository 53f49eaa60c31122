"""Tells the sidecar which parts of an engine have failed together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_shim.sglang.engine_description import DFLASH_NAME
from speculation.v1 import engine_pb2

if TYPE_CHECKING:
    from engine_shim.common.losses import Losses
    from engine_shim.sglang.drafters.dflash import DFlashDrafter
    from engine_shim.sglang.drafters.row_drafting import RowDrafting


def lose_block(losses: Losses, block: DFlashDrafter, rows: RowDrafting | None) -> None:
    """Reports a DFlash drafter that no longer drafts, and its mixture with the lookup."""
    losses.lose(engine_pb2.CAPABILITY_DRAFTER, block.over, DFLASH_NAME)
    if rows is not None and (mixture := rows.mixture_of(DFLASH_NAME)):
        losses.lose(engine_pb2.CAPABILITY_DRAFTER, block.over, mixture)


def lose_lookup(losses: Losses, rows: RowDrafting) -> None:
    """Reports a lookup that no longer drafts, and all mixtures with it."""
    for name in rows.names:
        losses.lose(engine_pb2.CAPABILITY_DRAFTER, rows.over, name)
