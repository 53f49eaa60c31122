"""Makes the decisions: takes frozen values and returns frozen values.

There is no I/O, no gRPC, no clock but the one passed in and no randomness: the same reports at the
same times give the same plans, so any decision can be replayed.
"""
