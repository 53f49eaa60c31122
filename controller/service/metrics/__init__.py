"""Prometheus metrics of the sidecar: what there is (`decisions`, `steps`, `sidecar`), served."""

from controller.service.metrics.server import MetricsServer

__all__ = ["MetricsServer"]
