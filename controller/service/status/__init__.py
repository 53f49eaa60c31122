"""What people and probes read about the sidecar and its engines."""
