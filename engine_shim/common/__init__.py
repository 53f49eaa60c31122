"""Holds what the shims of all engines share: errors, settings, losses, names, flags of a report.

It knows no engine, and imports no torch.
"""
