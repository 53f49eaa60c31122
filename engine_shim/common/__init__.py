"""Code that the shims of all engines share: errors, settings, lost capabilities, flags of a report.

It knows no engine, and does not import torch.
"""
