"""Prometheus metrics of the sidecar: what there is (`engines`, `sidecar`), served."""
