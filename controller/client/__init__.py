"""Connects programs and commands to a running sidecar."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from controller.client.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    """Imports the client, and gRPC, on first use: commands configure gRPC before that."""
    if name != "Client":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from controller.client.client import Client  # noqa: PLC0415  # only when asked for

    return Client
