"""Where a sidecar's sockets are, from the one path that people name."""

from pathlib import Path

_OPERATORS = "-operators"


def operators_path(path: Path) -> Path:
    """NAME-operators.sock for NAME.sock; the operators' socket itself stays."""
    if path.stem.endswith(_OPERATORS):
        return path
    return path.with_name(f"{path.stem}{_OPERATORS}{path.suffix}")


def inner_path(path: Path) -> Path:
    """Where gRPC listens behind the operators' socket: a directory that only the sidecar enters."""
    return path.with_name(f".{path.stem}.d") / "grpc.sock"
