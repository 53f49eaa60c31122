"""Lets every decode step of an engine wait for the trainer of its drafter.

An engine never does so by itself: an update lands whenever the trainer has finished, so how many
updates a step has behind it depends on the machine.  With LAB_LOCKSTEP=1 an update of every S-th
round lands before the next step drafts, and acceptance by step or by update can be counted beside
any load.  Times of such an engine say nothing.
"""

import os
from select import select
from typing import Final

LOCKSTEP_VARIABLE: Final = "LAB_LOCKSTEP"
# A trainer that takes longer has failed, and the engine serves without it.
_MOST_SECONDS: Final = 120.0


def install() -> None:
    """Wraps the plugin's updates if the variable asks for it; before SGLang forks its processes."""
    if os.environ.get(LOCKSTEP_VARIABLE) != "1":
        return
    from engine_shim.sglang.learning.online_updates import OnlineUpdates

    before_step = OnlineUpdates.before_step

    def wait_before_step(self: OnlineUpdates) -> None:
        channel = self._trainer._channel
        if channel is not None and not self._idle:
            select([channel._socket], [], [], _MOST_SECONDS)
        before_step(self)

    type.__setattr__(OnlineUpdates, "before_step", wait_before_step)
