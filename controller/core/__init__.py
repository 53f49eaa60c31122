"""Makes the decisions: takes frozen values and returns frozen values.

There is no I/O, no gRPC and no randomness, and the clock is passed in.  The same reports at the
same times give the same plans, so any decision can be replayed.
"""
