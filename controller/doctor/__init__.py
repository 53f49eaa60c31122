"""Checks a pod from inside: what is wrong between engine and sidecar, and what to do about it."""

from controller.doctor.finding import Finding, Level
from controller.doctor.run import DoctorRequest, diagnose

__all__ = ["DoctorRequest", "Finding", "Level", "diagnose"]
