"""One stream of prompts, four policies, on the real SGLang: `python -m lab.demo`."""

from lab.harness.requirements import require

require(
    "lab.demo", "aiohttp", "controller", "grpc", "matplotlib", "numpy", "psutil", "rich",
    "speculation", "typer",
)  # fmt: skip
