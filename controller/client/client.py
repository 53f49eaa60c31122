"""A client of one sidecar for programs: engines, explanations, overrides and profiles.

Results are protobuf messages (docs/api.md).  Errors are those of `controller.client.errors`, and
EndlessListError of `controller.client.paging` for a list that does not end.  Every call has a
deadline.  If the sidecar cannot be reached, idempotent calls are retried: those that read, and
changes with a request id, which the sidecar carries out only once.
"""

import json
import math
import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, Self, TypeVar

import grpc

from controller.client.channels import Credentials, reading_channel, user_name
from controller.client.errors import NotFoundError, UnsupportedError, call_error
from controller.client.paging import PageFollower, collect_request_pages
from controller.util.sockets import operators_address, sidecar_address
from speculation.v1 import policy_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc

DEFAULT_ADDRESS: Final = "unix:/run/speculation/controller.sock"
_REPEATED: Final = {
    "speculation.v1.InspectionService": ("ListEngines", "Overview", "Explain", "ListFleet"),
    "speculation.v1.PolicyService": (
        "SetOverride", "ClearOverride", "GetOverride", "ListOverrides", "QueryAudit",
    ),
    "speculation.v1.ProfilingService": (
        "ListProfiles", "GetProfile", "PushProfile", "InstallProfile",
    ),
}  # fmt: skip
# Attempts within the deadline; gRPC allows at most 5.
_RETRY: Final = {
    "maxAttempts": 5,
    "initialBackoff": "0.2s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_SERVICE_CONFIG: Final = {
    "methodConfig": [
        {
            "name": [
                {"service": service, "method": method}
                for service, methods in _REPEATED.items()
                for method in methods
            ],
            "retryPolicy": _RETRY,
        }
    ]
}
_OPTIONS: Final = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # Otherwise all attempts would be made before gRPC reconnects.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

Answer = TypeVar("Answer")


class Client:
    """Calls one sidecar.

    Changes use the operators' socket.  Reads use it too if this process may open it, and otherwise
    the engines' socket.  Over TCP both are the same address.  It may be used from several
    threads.
    """

    def __init__(
        self, address: str = "", *, author: str = "", timeout_seconds: float = 10.0
    ) -> None:
        """Connects with the first call.

        address: unix:PATH, /PATH or HOST:PORT; by default CONTROLLER_ADDRESS, or the usual socket.
        author: who sets and clears overrides; by default CONTROLLER_AUTHOR, or the user's name.
        timeout_seconds: for each call, including retries.

        Raises ValueError for a text that is not an address, and CredentialsError if the environment
        names credentials that cannot be used.
        """
        self.address = sidecar_address(
            address or os.environ.get("CONTROLLER_ADDRESS") or DEFAULT_ADDRESS
        )
        self.author = author or os.environ.get("CONTROLLER_AUTHOR") or user_name()
        self.timeout_seconds = timeout_seconds
        self._credentials = Credentials.for_address(self.address)
        operators = operators_address(self.address)
        self._reading = reading_channel(self._credentials, self.address, *_OPTIONS)
        self._changing = self._credentials.channel(operators, *_OPTIONS)
        self._inspection = service_pb2_grpc.InspectionServiceStub(self._reading)
        self._policy = policy_pb2_grpc.PolicyServiceStub(self._reading)
        self._profiles = service_pb2_grpc.ProfilingServiceStub(self._reading)
        self._policy_changes = policy_pb2_grpc.PolicyServiceStub(self._changing)
        self._profile_changes = service_pb2_grpc.ProfilingServiceStub(self._changing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and cancels running calls."""
        self._reading.close()
        self._changing.close()

    def sidecar(self) -> service_pb2.SidecarStatus:
        """Returns the sidecar's version, its uptime and the health of its services."""
        request = service_pb2.ListEnginesRequest(page_size=1)
        return self._call(self._inspection.ListEngines, request).sidecar

    def engines(self) -> list[service_pb2.EngineStatus]:
        """Returns the engines that the sidecar steers, with their plans, by id."""
        return self._list_all(self._inspection.ListEngines, service_pb2.ListEnginesRequest())

    def overview(self) -> list[service_pb2.EngineOverview]:
        """Returns what each engine runs now and what it gains by it, by id."""
        return self._list_all(self._inspection.Overview, service_pb2.OverviewRequest())

    def fleet(self, words: str = "") -> list[service_pb2.FleetEngine]:
        """Returns the engines of all sidecars that share the store.

        words: a filter such as `pod-7 link=alone` (docs/fleet.md); by default all engines match.

        Raises InvalidRequestError for an invalid filter.
        """
        request = service_pb2.ListFleetRequest(filter=words)
        return self._list_all(self._inspection.ListFleet, request)

    def explain(self, engine_id: str, batch_size: int = 0) -> service_pb2.ExplainResponse:
        """Explains the choice at a batch size; 0: the last reported one.

        Raises NotFoundError for an engine that the sidecar does not know.
        """
        request = service_pb2.ExplainRequest(engine_id=engine_id, batch_size=batch_size)
        return self._call(self._inspection.Explain, request)

    def set_override(
        self,
        override: policy_pb2.Override,
        *,
        ttl_seconds: float | None = None,
        etag: str = "",
        dry_run: bool = False,
        require_effect: bool = True,
    ) -> policy_pb2.SetOverrideResponse:
        """Sets an override, which is in force when this returns.

        override: if its id or its author is empty, a new id and the client's author are used.
        ttl_seconds: math.inf for a permanent override; by default the sidecar's default time.
        etag: of the override that this one replaces.  dry_run: checks everything and sets nothing.

        Raises InvalidRequestError, AlreadyExistsError, OverrideChangedError, StoreUnavailableError,
        and with require_effect NoEffectError and NotFoundError, if nothing would change for the
        engines of this sidecar.
        """
        request = policy_pb2.SetOverrideRequest(
            override=override, etag=etag, dry_run=dry_run, require_effect=require_effect,
            request_id=str(uuid.uuid4()),
        )  # fmt: skip
        request.override.override_id = override.override_id or f"client-{uuid.uuid4()}"
        request.override.author = override.author or self.author
        if ttl_seconds == math.inf:
            request.for_ever = True
        elif ttl_seconds is not None:
            request.ttl_seconds = ttl_seconds
        return self._call(self._policy_changes.SetOverride, request)

    def get_override(self, override_id: str) -> policy_pb2.HeldOverride:
        """Returns an override in force.  Raises NotFoundError."""
        request = policy_pb2.GetOverrideRequest(override_id=override_id)
        try:
            return self._call(self._policy.GetOverride, request).held
        except UnsupportedError:
            # An older sidecar without this call can list overrides.
            for entry in self.overrides():
                if entry.override.override_id == override_id:
                    return entry
            missing = NotFoundError(
                f"no override {override_id!r} is in force", resource=override_id
            )
            missing.status, missing.resource_type = grpc.StatusCode.NOT_FOUND, "override"
            raise missing from None

    def overrides(self) -> list[policy_pb2.HeldOverride]:
        """Returns the overrides in force, file-based policy among them, by id."""
        request = policy_pb2.ListOverridesRequest()
        return self._list_all(self._policy.ListOverrides, request, "overrides")

    def clear_override(
        self, override_id: str, reason: str, *, etag: str = "", allow_missing: bool = False
    ) -> policy_pb2.ClearOverrideResponse:
        """Ends an override; it has ended when this returns.

        etag: end it only if it still has this etag.  allow_missing: it may have ended already.

        Raises NotFoundError, OverrideChangedError, InvalidRequestError, StoreUnavailableError.
        """
        request = policy_pb2.ClearOverrideRequest(
            override_id=override_id, reason=reason, author=self.author, etag=etag,
            allow_missing=allow_missing, request_id=str(uuid.uuid4()),
        )  # fmt: skip
        try:
            return self._call(self._policy_changes.ClearOverride, request)
        except NotFoundError as error:
            # An error without a reason is from a sidecar that does not support allow_missing.
            if allow_missing and not error.reason:
                return policy_pb2.ClearOverrideResponse(missing=True)
            raise

    def watch_overrides(self) -> Iterator[policy_pb2.WatchOverridesResponse]:
        """Yields the active overrides, then every change, until the caller stops.

        Raises UnavailableError and OverloadedError, after which the caller may watch again.
        """
        try:
            call = self._policy.WatchOverrides(
                policy_pb2.WatchOverridesRequest(), metadata=self._credentials.metadata()
            )
            try:
                yield from call
            finally:
                call.cancel()
        except grpc.RpcError as error:
            raise call_error(self.address, error) from error

    def audit(self, override_id: str = "") -> Iterator[policy_pb2.AuditRecord]:
        """Yields the audit records, the newest first; only those of one override if it is named.

        Raises EndlessListError.
        """
        token, pages = "", PageFollower(keeps=False)
        while True:
            request = policy_pb2.QueryAuditRequest(override_id=override_id, page_token=token)
            answer = self._call(self._policy.QueryAudit, request)
            yield from answer.records
            token = pages.next_token(answer)
            if not token:
                return

    def profiles(self) -> list[service_pb2.ShelvedProfile]:
        """Returns the profiles in the sidecar's store, the newest measurements first."""
        request = service_pb2.ListProfilesRequest()
        return self._list_all(self._profiles.ListProfiles, request, "profiles")

    def get_profile(self, *, profile_id: str = "", engine_id: str = "") -> str:
        """Returns the JSON text of the profile with this id or identity, or of an engine.

        Raises ValueError unless exactly one argument is given, and NotFoundError.
        """
        if bool(profile_id) == bool(engine_id):
            raise ValueError("name either a profile or an engine")
        request = service_pb2.GetProfileRequest()
        if engine_id:
            request.engine_id = engine_id
        else:
            request.profile_id = profile_id
        return self._call(self._profiles.GetProfile, request).profile_json

    def push_profile(self, profile_json: str) -> service_pb2.PushProfileResponse:
        """Puts a profile into the store, for every pod of the fleet that it fits.

        Raises InvalidRequestError, StoreUnavailableError.
        """
        request = service_pb2.PushProfileRequest(
            profile_json=profile_json, request_id=str(uuid.uuid4())
        )
        return self._call(self._profile_changes.PushProfile, request)

    def install_profile(self, profile_json: str) -> service_pb2.InstallProfileResponse:
        """Puts a profile into use for the engines of this sidecar that it fits.

        Raises InvalidRequestError, and PreconditionError if it fits none.
        """
        request = service_pb2.InstallProfileRequest(
            profile_json=profile_json, request_id=str(uuid.uuid4())
        )
        return self._call(self._profile_changes.InstallProfile, request)

    def _list_all(
        self, method: Callable[..., Any], request: Any, rows: str = "engines"
    ) -> list[Any]:
        """Returns the rows of all pages."""
        answer = collect_request_pages(partial(self._call, method), request, rows)
        return list(getattr(answer, rows))

    def _call(self, method: Callable[..., Answer], request: Any) -> Answer:
        try:
            return method(
                request, timeout=self.timeout_seconds, metadata=self._credentials.metadata()
            )
        except grpc.RpcError as error:
            raise call_error(self.address, error) from error
