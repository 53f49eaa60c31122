"""Runs the sidecar: gRPC services, sessions, metrics and lifecycle around the decision core."""
