"""Diagnoses an engine from its reports."""
