"""Decisions on record: what each session's core was given, on disk, and deciding it again.

recorded_controller -> recorder (a thread) -> segments on disk -> recording -> replay and
incident_report
"""
