"""Completes ids in a shell by asking the sidecar, with a short time limit.

If the sidecar does not answer, is slow or refuses the caller, nothing is offered and no error is
printed: the user is waiting at the prompt.
"""

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import typer

from controller.cli.connection import DEFAULT_ADDRESS

_ANSWER_SECONDS_MAX = 0.3


def engine_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Offers the ids of the engines that the sidecar steers."""
    from speculation.v1 import service_pb2, service_pb2_grpc

    def ask(channel: Any, **options: Any) -> Iterable[str]:
        answer = service_pb2_grpc.InspectionServiceStub(channel).ListEngines(
            service_pb2.ListEnginesRequest(), **options
        )
        return (status.engine.engine_id for status in answer.engines)

    return _matching_ids(context, incomplete, ask)


def override_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Offers the ids of the overrides in force; those of a policy file cannot be cleared."""
    from speculation.v1 import policy_pb2, policy_pb2_grpc

    def ask(channel: Any, **options: Any) -> Iterable[str]:
        answer = policy_pb2_grpc.PolicyServiceStub(channel).ListOverrides(
            policy_pb2.ListOverridesRequest(), **options
        )
        return (entry.override.override_id for entry in answer.overrides if not entry.origin)

    return _matching_ids(context, incomplete, ask)


def profile_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Offers the ids of the profiles in the sidecar's store."""
    from speculation.v1 import service_pb2, service_pb2_grpc

    def ask(channel: Any, **options: Any) -> Iterable[str]:
        answer = service_pb2_grpc.ProfilingServiceStub(channel).ListProfiles(
            service_pb2.ListProfilesRequest(), **options
        )
        return (item.profile_id for item in answer.profiles)

    return _matching_ids(context, incomplete, ask)


def _matching_ids(
    context: typer.Context, incomplete: str, ask: Callable[..., Iterable[str]]
) -> list[str]:
    # An error offers nothing: there is no place to print it while the shell completes.
    with contextlib.suppress(Exception):
        return [
            candidate
            for candidate in _query_ids(context, ask)
            if candidate.startswith(incomplete) and candidate.isprintable()
        ]
    return []


def _query_ids(context: typer.Context, ask: Callable[..., Iterable[str]]) -> list[str]:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from controller.client.channels import Credentials
    from controller.util.sockets import sidecar_address

    address_text = (
        context.params.get("address")
        or context.params.get("sidecar")
        or os.environ.get("CONTROLLER_ADDRESS")
    )
    address = sidecar_address(str(address_text or DEFAULT_ADDRESS))
    credentials = Credentials.for_address(address)
    with credentials.channel(address) as channel:
        return list(ask(channel, timeout=_ANSWER_SECONDS_MAX, metadata=credentials.metadata()))


@contextlib.contextmanager
def join_bash_words(variables: MutableMapping[str, str]) -> Iterator[None]:
    """Joins, while the block runs, the words that bash has split at colons.

    Ids such as pod-7:30000 and addresses have colons.  Bash passes pod-7, : and 3 as words, and
    replaces only what follows the last colon.  variables: the environment; its COMP_WORDS and
    COMP_CWORD are changed.
    """
    command_line, position = variables.get("COMP_WORDS", ""), variables.get("COMP_CWORD", "")
    if variables.get("_CONTROLLER_COMPLETE") != "complete_bash" or not position.isdecimal():
        yield
        return
    separator = "\n" if "\n" in command_line else " "
    line_to_cursor = separator.join(command_line.split(separator)[: int(position) + 1])
    joined = re.sub(rf"{separator}?:{separator}?", ":", line_to_cursor)
    variables["COMP_WORDS"] = joined
    variables["COMP_CWORD"] = str(joined.count(separator))
    completed_prefix = joined.rpartition(separator)[2].rpartition(":")[:2]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            yield
    finally:
        for candidate in output.getvalue().splitlines():
            print(candidate.removeprefix("".join(completed_prefix)))
