"""Plays streams of requests on real engines: child processes, a sidecar, a load generator."""
