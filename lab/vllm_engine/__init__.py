"""The unmodified vLLM on a CPU, with the small models of `lab.cpu_engine.models`."""
