import subprocess
import sys

from tests.support.service_harness import ENVIRONMENT

FORKING = """
import os, sys
from engine_shim.common.process import register_exit_handler
register_exit_handler(
    lambda: print("ended by", "the engine" if os.getpid() == engine else "its fork")
)
engine = os.getpid()
if not os.fork():
    sys.exit()
os.wait()
print("the fork is gone")
"""


def test_what_the_engine_has_started_does_not_end_with_a_fork_of_it():
    done = subprocess.run(
        [sys.executable, "-c", FORKING], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["the fork is gone", "ended by the engine"]
