"""Runs the unmodified SGLang wheel, speculation included, on a machine without a GPU."""

from lab.cpu_engine.environment import cpu_engine_env as cpu_engine_env
