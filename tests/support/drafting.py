"""Takes apart what the roofline adds up, for tests of the parts."""

from controller.core.cost import roofline
from controller.core.model_shapes import LinearAttention


def draft_seconds(drafter, device, batch_sizes, gammas, kv_tokens=0.0):
    """Returns [gammas, batch_sizes], the seconds of drafting alone, without overheads."""
    batch = roofline._check_batch_sizes(batch_sizes)
    seconds = roofline._pass_seconds(
        drafter, device, batch, roofline._check_kv_tokens(kv_tokens, batch)
    )
    return [[drafter.passes(gamma)] for gamma in gammas] * seconds


def state_bytes(shape):
    """Returns the bytes of a sequence's recurrent state, all layers."""
    return sum(n * kind.state_bytes for kind, n in shape.attention if type(kind) is LinearAttention)
