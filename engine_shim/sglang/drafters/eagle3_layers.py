"""Has an EAGLE3 drafter that names no layers of its target read the default ones.

A checkpoint may name an empty list (`eagle_aux_hidden_state_layer_ids: []`, as NVIDIA's ModelOpt
writes it).  SGLang's drafter takes that for the three default layers, its targets for none, and the
first pass would end the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def around_resolve(original: Callable[..., Any], **arguments: Any) -> Any:
    """Wraps `resolve_spec_aux_hidden_state_config`, to leave out an empty list of layers."""
    found = original(**arguments)
    if not found.eagle_aux_hidden_state_layer_ids:
        found.eagle_aux_hidden_state_layer_ids = None
    return found
