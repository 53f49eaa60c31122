"""Pure decisions: frozen values in, frozen values out.

There is no I/O, no gRPC, no clock but the one passed in and no randomness: the same reports at the
same times give the same plans, so any decision can be replayed.
"""
