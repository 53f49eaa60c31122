"""Checks whether an engine's shim, or a sidecar, keeps the contract."""
