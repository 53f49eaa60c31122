"""One stream of prompts, four policies, on the real SGLang: `python -m engine_shim.cpu.demo`."""
