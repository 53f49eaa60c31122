"""A stand-in for ``sgl_kernel`` in plain torch: SGLang's CPU engine without its compiled operators.

Covers what SGLang 0.5.23 calls for dense Qwen3/Llama-style text models in float32 and bfloat16,
plain and speculative (EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM), with tensor-parallel size 1 or 2
and any page size.  In float32, on one rank and without cached prefixes, it also covers experts,
latent attention (DeepSeek V3) and gated delta networks (Qwen3-Next, Qwen3.5).
"""

import os
import sys

# Each of them registers its operators.
from . import (
    attention,
    dense,
    experts,
    kv_cache,
    latent,
    process,
    recurrent,
    speculative,
)
from ._registry import OPERATORS, OperatorPlaceholder, bind_placeholders
from ._registry import MissingOperatorError as MissingOperatorError
from .sampling import top_k_renorm_prob as top_k_renorm_prob
from .sampling import top_p_renorm_prob as top_p_renorm_prob
from .sampling import (
    tree_speculative_sampling_target_only as tree_speculative_sampling_target_only,
)

__version__ = "0.4.10"

bind_placeholders()
# SGLang imports operators from here by their names.
globals().update(OPERATORS)
# SGLang also imports operators from these modules.
for _name in ("kvcacheio", "mamba"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]
if os.environ.get("EMULATED_CUDA") == "1":
    from emulated_cuda import library

    library.install(sys.modules[__name__])


def __getattr__(name: str) -> OperatorPlaceholder:
    """Lets SGLang import any other operator by name; it fails when it is called."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return OperatorPlaceholder(name)
