"""Shows what steering gains: one compressed day, four policies, on the real SGLang at a GPU's pace.

python -m lab.demo
"""

from lab.harness.requirements import require

require(
    "lab.demo", "aiohttp", "controller", "grpc", "numpy", "psutil", "pydantic",
    "rich", "speculation", "typer",
)  # fmt: skip
