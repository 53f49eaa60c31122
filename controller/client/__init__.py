"""Connects programs and commands to a running sidecar."""

from controller.client.client import Client

__all__ = ["Client"]
