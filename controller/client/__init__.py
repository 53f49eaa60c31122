"""Connects commands to a running sidecar."""
