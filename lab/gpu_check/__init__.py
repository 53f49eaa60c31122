"""Measures the real SGLang with CUDA graphs, steered and unsteered (`make gpu-check`)."""

from lab.harness.requirements import require

require("lab.gpu_check", "aiohttp", "controller", "grpc", "psutil", "rich", "speculation", "typer")
