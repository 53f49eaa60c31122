"""Shows people and probes the sidecar and its engines."""
