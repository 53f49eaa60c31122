"""The engines of the parts that look at tokens: the small trained models, without any dummy.

PLAIN         plain decoding
EXACT         both drafters and the prompt lookup, with the plugin
NO_OVERLAP    the same without the overlap schedule
LEARNING      a drafter that learns online
*_BFLOAT16    in bfloat16; FIXED is SGLang's own speculation with one draft length
"""

from collections.abc import Sequence

from lab.cpu_engine.engine_command import MODELS, eagle3_flags, server_command
from lab.gpu_check.shapes import Device, Scale
from lab.harness.engine_environment import steered_by

PLAIN, EXACT, NO_OVERLAP, LEARNING = "plain", "exact", "exact-no-overlap", "learning"
PLAIN_BFLOAT16, EXACT_BFLOAT16 = "plain-bfloat16", "exact-bfloat16"
FIXED_BFLOAT16 = "fixed-bfloat16"
SMALL_ENGINES = (
    PLAIN, EXACT, NO_OVERLAP, LEARNING, PLAIN_BFLOAT16, EXACT_BFLOAT16, FIXED_BFLOAT16,
)  # fmt: skip
# Those that have the plugin.
STEERED_SMALL = (EXACT, NO_OVERLAP, LEARNING, EXACT_BFLOAT16)
LEARNING_GAMMA = 3
MAX_BATCH = 8
STARTUP_GAMMA = 3

# NVIDIA_TF32_OVERRIDE turns TF32 off in cuBLAS, whatever torch asks for; TRITON_F32_DEFAULT in
# the attention kernels, whose products of float32 are TF32 otherwise.
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}

# Draft lengths, and batch sizes that have CUDA graphs.
_GAMMAS, _GRAPH_SIZES = (0, 1, 2, 3, 5, 7), (1, 2, 4, 8)
# The emulation captures slowly, and plays four prompts; DFlash's block needs the longest length.
_EMULATED_GAMMAS, _EMULATED_GRAPH_SIZES = (0, 3, 7), (1, 4)
_DRAFT, _LEARNING_DRAFT = "draft-mixed", "draft-code"
_MEMORY_SHARE = "0.2"


def gammas(device: Device) -> tuple[int, ...]:
    """Returns the draft lengths of the engines that are steered."""
    return _EMULATED_GAMMAS if device is Device.EMULATED else _GAMMAS


def graph_sizes(device: Device) -> tuple[int, ...]:
    """Returns the batch sizes that have CUDA graphs."""
    return _EMULATED_GRAPH_SIZES if device is Device.EMULATED else _GRAPH_SIZES


def arms(device: Device) -> tuple[tuple[str, int], ...]:
    """Lists drafter and draft length of what is changed at random; at gamma 0 the drafter sleeps.

    Mixtures with the prompt lookup run at two of the lengths.
    """
    lengths = [gamma for gamma in gammas(device) if gamma]
    mixed = (lengths[len(lengths) // 2], lengths[-1])
    return (
        *(("eagle3", gamma) for gamma in gammas(device)),
        *(("dflash", gamma) for gamma in lengths),
        *(
            (name, gamma)
            for name in ("ngram", "eagle3+ngram", "dflash+ngram")
            for gamma in dict.fromkeys(mixed)
        ),
    )


def is_bfloat16(engine_name: str) -> bool:
    """Whether an engine runs in bfloat16; the others run in float32."""
    return engine_name in (PLAIN_BFLOAT16, EXACT_BFLOAT16, FIXED_BFLOAT16)


def command(engine_name: str, port: int, options: Sequence[str], device: Device) -> list[str]:
    """Makes the command line of an engine; only its speculation differs from plain decoding's."""
    draft = MODELS / (_LEARNING_DRAFT if engine_name == LEARNING else _DRAFT)
    plain = engine_name in (PLAIN, PLAIN_BFLOAT16)
    flags = [
        "--dtype", "bfloat16" if is_bfloat16(engine_name) else "float32",
        "--skip-tokenizer-init",
        "--sleep-on-idle",
        *(_cuda_options(device) if device.takes_cuda_options else ()),
        *([] if plain else eagle3_flags(draft, STARTUP_GAMMA)),
        *(["--disable-overlap-schedule"] if engine_name == NO_OVERLAP else []),
        *options,
    ]  # fmt: skip
    return server_command(device.server_module, MODELS / "target", port, MAX_BATCH, flags)


def _cuda_options(device: Device) -> list[str]:
    # FlashInfer and FlashAttention have no float32, and FlashInfer's sampling is not needed.
    return [
        "--mem-fraction-static", _MEMORY_SHARE,
        "--attention-backend", "triton",
        "--sampling-backend", "pytorch",
        "--cuda-graph-backend-prefill", "disabled",
        "--cuda-graph-bs-decode", *map(str, graph_sizes(device)),
    ]  # fmt: skip


def environment(engine_name: str, address: str, device: Device) -> dict[str, str]:
    """Makes the variables of an engine; address: the sidecar's."""
    common = {} if is_bfloat16(engine_name) else dict(NO_TF32)
    if engine_name not in STEERED_SMALL:
        return common
    if engine_name == LEARNING:
        learning = steered_by(address, engine_name, (0, 1, LEARNING_GAMMA))
        return common | learning | {"SPECULATION_ONLINE_UPDATES": "1"}
    return (
        common
        | steered_by(address, engine_name, gammas(device))
        | {
            "SPECULATION_DFLASH_MODEL_PATH": str(MODELS / "dflash"),
            "SPECULATION_LOOKUP": "1",
        }
    )


def compared_policies(device: Device, scale: Scale) -> tuple[str, ...]:
    """Names the float32 engines that are compared with plain decoding."""
    if device.overlaps and scale.both_schedules:
        return (EXACT, NO_OVERLAP)
    return (EXACT,)


def count_captures(engine_name: str, device: Device) -> int:
    """Counts the CUDA graphs of an engine."""
    sizes = len(graph_sizes(device))
    if engine_name in (PLAIN, PLAIN_BFLOAT16):
        return sizes
    if engine_name == FIXED_BFLOAT16:
        return count_chain_captures((STARTUP_GAMMA,), sizes)
    if engine_name == LEARNING:
        return count_chain_captures((0, 1, LEARNING_GAMMA), sizes)
    return count_chain_captures(gammas(device), sizes) + sizes


def count_chain_captures(gammas: Sequence[int], sizes: int) -> int:
    """Counts the graphs of an EAGLE engine's draft lengths, for a number of batch sizes.

    Each length has graphs of the verification and of the pass in which the drafter reads what was
    verified; a chain of more than one draft has one for its further passes as well.
    """
    return sizes * sum(3 if gamma > 1 else 2 for gamma in gammas)
