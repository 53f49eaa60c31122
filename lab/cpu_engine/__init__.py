"""What lets the unmodified SGLang wheel run, speculate and be tested on a machine without a GPU."""

from lab.cpu_engine.environment import cpu_engine_env as cpu_engine_env
