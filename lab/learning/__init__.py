"""The papers' effects on small real models: `make lab`."""

from lab.harness.requirements import require

require(
    "lab.learning", "aiohttp", "controller", "engine_shim", "grpc", "matplotlib", "numpy", "psutil",
    "rich", "speculation", "tokenizers", "torch", "typer",
)  # fmt: skip
