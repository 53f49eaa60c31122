"""One stream of prompts, four policies, on the real SGLang: `python -m lab.demo`."""
