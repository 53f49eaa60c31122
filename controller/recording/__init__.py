"""Records the inputs of each session's core on disk, and repeats its decisions from them.

recorded_controller -> recorder (a thread) -> segments on disk -> recording -> replay and
incident_report
"""
