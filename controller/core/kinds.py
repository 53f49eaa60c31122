"""The kinds of drafters."""

from enum import Enum


class DrafterKind(Enum):
    """How drafting scales with the draft length."""

    MTP = "mtp"  # gamma serial passes of a small head (MTP, EAGLE, EAGLE3)
    DFLASH = "dflash"  # one pass for a fixed block
    STANDALONE = "standalone"  # gamma serial passes of a small model
    NGRAM = "ngram"  # prompt lookup
