"""What outlives a sidecar: overrides and their audit, in a file or in Redis behind one port."""
