"""The tables of "Test-Time Speculation" (arXiv:2605.09329): what update strides do.

Table 3: DFlash on Qwen3.5-122B, acceptance length and tokens/s.  Table 7: DFlash on Qwen3-8B,
acceptance length.  Table 8: acceptance length and speed on one benchmark of Table 7, relative to a
stride of 1.
"""

from typing import Final

# Benchmark -> stride -> (acceptance length, tokens/s); stride 0 is plain DFlash.
_STRIDES_3 = (0, 20, 10, 5, 2, 1)
TABLE_3: Final[dict[str, dict[int, tuple[float, float]]]] = {
    name: dict(zip(_STRIDES_3, cells, strict=True))
    for name, cells in {
        "AIME 2024": ((2.9, 28.2), (3.3, 42.6), (3.5, 44.8), (3.8, 46.8), (4.3, 46.7), (4.8, 40.5)),
        "AIME 2025": ((2.9, 27.6), (3.7, 43.2), (3.8, 44.6), (4.3, 45.7), (4.7, 45.4), (4.9, 37.5)),
        "GPQA": ((2.6, 24.1), (3.0, 30.3), (3.1, 32.5), (3.3, 32.3), (3.5, 30.3), (3.5, 24.4)),
        "LiveCodeBench": (
            (2.4, 24.9), (3.1, 31.3), (3.2, 31.5), (3.4, 31.3), (3.8, 30.4), (4.0, 25.7),
        ),
        "MATH-500": ((3.4, 29.7), (3.8, 43.7), (4.0, 46.5), (4.2, 49.7), (4.3, 43.5), (4.5, 35.9)),
        "OlyBench-Math": (
            (3.4, 27.7), (3.9, 39.4), (4.0, 42.0), (4.3, 44.4), (4.6, 41.4), (4.7, 33.2),
        ),
        "OlyBench-Phy": (
            (3.0, 27.9), (3.4, 34.4), (3.6, 36.5), (3.7, 36.4), (4.2, 35.7), (3.9, 27.8),
        ),
        "TheoremQA": ((3.3, 30.0), (3.7, 41.9), (3.7, 42.5), (4.1, 51.3), (4.1, 44.5), (4.2, 30.4)),
    }.items()
}  # fmt: skip

# Benchmark -> stride -> acceptance length.
_STRIDES_7 = (0, 1, 5, 15, 30, 50)
TABLE_7: Final[dict[str, dict[int, float]]] = {
    name: dict(zip(_STRIDES_7, lengths, strict=True))
    for name, lengths in {
        "AIME 2024": (3.3, 4.6, 4.3, 3.9, 3.7, 3.6),
        "AIME 2025": (3.1, 4.1, 3.9, 3.7, 3.5, 3.3),
        "GPQA": (3.2, 4.7, 4.3, 4.0, 3.8, 3.7),
        "LiveCodeBench": (2.9, 4.5, 4.2, 3.9, 3.6, 3.5),
        "MATH-500": (3.8, 4.3, 4.1, 4.0, 3.9, 3.9),
        "OlyBench-Math": (2.7, 4.1, 3.8, 3.5, 3.2, 3.1),
        "OlyBench-Phy": (2.8, 4.3, 3.9, 3.5, 3.3, 3.2),
        "TheoremQA": (3.5, 4.3, 4.0, 3.8, 3.7, 3.7),
    }.items()
}

# Stride -> (acceptance length, tokens/s), relative to a stride of 1.
TABLE_8: Final[dict[int, tuple[float, float]]] = {
    1: (1.0, 1.0),
    5: (0.93, 1.77),
    10: (0.88, 1.83),
    15: (0.85, 1.79),
    20: (0.84, 1.80),
    30: (0.80, 1.65),
    40: (0.79, 1.64),
    50: (0.77, 1.56),
}
