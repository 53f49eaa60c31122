"""`make gpu-check`: the real SGLang with CUDA graphs, measured and held against itself."""
