"""An engine's link whose agents are sockets of the test."""

import contextlib
import socket
from collections import deque
from collections.abc import Iterator

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import PlanFollower, make_safe_default
from speculation.v1.engine_pb2 import Drafter
from tests.support.step_reports import send, step_report


class Agents:
    """Stands where the supervisor stands: hands out real sockets, starts no process."""

    def __init__(self) -> None:
        self._new_sockets: deque[socket.socket] = deque()
        self.ends: list[socket.socket] = []
        self.starts = 0
        self.agent_pid = None

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(0)
        theirs.settimeout(0)
        self._new_sockets.append(ours)
        self.ends.append(theirs)
        self.starts += 1
        return theirs

    def take_socket(self) -> socket.socket | None:
        return self._new_sockets.popleft() if self._new_sockets else None

    def stop(self) -> None:
        for end in (*self.ends, *self._new_sockets):
            end.close()


@contextlib.contextmanager
def linked() -> Iterator[tuple[EngineLink, Agents, socket.socket]]:
    agents = Agents()
    agent = agents.connect()
    safe = make_safe_default(1)
    state = PlanFollower([Drafter(name="eagle3", gammas=[0, 1, 3, 5])], safe, 10.0)
    link = EngineLink(agents, state)  # type: ignore[arg-type]
    try:
        yield link, agents, agent
    finally:
        link.close()
        agents.stop()


def report(link: EngineLink, step: int) -> bool:
    return send(link, step_report(step))
