"""Asks Sentinels for the primary, and says in words why none names it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from redis.asyncio.sentinel import Sentinel as _UntypedSentinel

from controller.store.redis_errors import NoPrimaryError, explained
from controller.store.redis_replies import shown

_Sentinel: Any = _UntypedSentinel
_NAMES_MAX: Final = 5


class Sentinels(_Sentinel):  # type: ignore[misc]
    """The Sentinels of one service.

    clients: one for each of them.  Differs from redis-py's in what a failure says, and in that one
    which does not answer is asked last the next time, also where the caller did not wait for it.
    """

    def __init__(self, clients: Sequence[Any]) -> None:
        super().__init__([])
        self.sentinels = list(clients)

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Returns the primary's address and port.  Raises NoPrimaryError."""
        reasons: dict[str, list[str]] = {}
        fixes: dict[str, None] = {}
        for client in tuple(self.sentinels):
            self._move(client, len(self.sentinels))
            try:
                states = await client.sentinel_masters()
                state = states.get(service_name)
                if state and self.check_master_state(state, service_name):
                    self._move(client, 0)
                    return state["ip"], state["port"]
                reason, fix = _refusal(service_name, states, state)
            except Exception as error:  # noqa: BLE001  # also whatever a reply makes it raise
                reason, fix = explained(error, "redis_sentinel_")
            reasons.setdefault(reason, []).append(_address(client))
            fixes[fix] = None
        said = "; ".join(f"{', '.join(where)}: {reason}" for reason, where in reasons.items())
        raise NoPrimaryError(
            f"no Sentinel names the primary of {service_name!r}: {said}",
            "; ".join(fix for fix in fixes if fix),
        )

    def _move(self, client: Any, place: int) -> None:
        self.sentinels.remove(client)
        self.sentinels.insert(place, client)


def _refusal(service: str, states: Mapping[str, Any], state: Any) -> tuple[str, str]:
    """Says why a Sentinel's answer names no primary, and what to do."""
    if state:
        return f"says that {_text(state['ip'])}:{state['port']} is down", "see that it runs"
    known = ", ".join(map(_text, sorted(states)[:_NAMES_MAX]))
    return f"watches {known or 'nothing'}, not {service!r}", "correct the service in redis_url"


def _text(said: str) -> str:
    return shown(said.encode(errors="replace"))


def _address(client: Any) -> str:
    place = client.connection_pool.connection_kwargs
    host = f"[{place['host']}]" if ":" in place["host"] else place["host"]
    return f"{host}:{place['port']}"
