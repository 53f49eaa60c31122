"""Replaces the module of sgl-flash-mla whose class SGLang names in annotations."""


class FlashMLASchedMeta:
    """A name for annotations; there are no instances."""
