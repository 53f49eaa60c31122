"""How a command calls a running sidecar."""
