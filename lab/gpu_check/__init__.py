"""Measures the real SGLang with CUDA graphs, steered and unsteered (`make gpu-check`)."""
