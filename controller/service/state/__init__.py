"""Holds what the sidecar keeps beside its sessions: overrides, profiles, the fleet, training."""
