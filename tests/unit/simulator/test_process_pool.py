import os

from simulator.process_pool import make_process_pool


def test_its_processes_are_no_forks_of_this_one():
    """The guard of the tests (tests/support/hang_guard.py) refuses a fork."""
    with make_process_pool(1) as pool:
        assert pool.submit(os.getpid).result(timeout=60) != os.getpid()
