"""The link and the lease in any order of events, in virtual time.

Every run deals the same courses of events.  Others, and for hours instead of seconds:

    CONCURRENCY_SEED=7 CONCURRENCY_EXAMPLES=100000 \\
        make test ARGS=tests/system/concurrency/test_machine.py
"""

import os
from typing import Final

import pytest

from tests.system.concurrency.dealing import run
from tests.system.concurrency.machine import Link

EXAMPLES: Final = int(os.environ.get("CONCURRENCY_EXAMPLES", "30"))
SEED: Final = int(os.environ.get("CONCURRENCY_SEED", "1"))


# Only a hang takes so long: none of what is tested depends on the machine's speed.
@pytest.mark.timeout(1800 + 30 * EXAMPLES)
def test_in_any_order_the_engine_runs_what_was_issued_and_the_core_counts_what_was_run():
    run(Link, EXAMPLES, SEED)
