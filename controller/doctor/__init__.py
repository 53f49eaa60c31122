"""Checks a pod from the inside: what is wrong between engine and sidecar, and how to fix it."""

from controller.doctor.finding import Finding, Level
from controller.doctor.run import DoctorRequest, diagnose

__all__ = ["DoctorRequest", "Finding", "Level", "diagnose"]
