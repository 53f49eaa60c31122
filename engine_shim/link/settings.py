"""Settings of the link and the plugin, from environment variables that begin with SPECULATION_."""

import difflib
import os
import re
from typing import Annotated, Final, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from engine_shim.link.errors import LinkSettingsError
from engine_shim.link.messages import MAX_GAMMA
from engine_shim.link.sidecar_address import is_local_address
from speculation.service_links import service_links

PREFIX: Final = "SPECULATION_"


class LinkSettings(BaseSettings):
    """Settings of the link; SPECULATION_GRACE_SECONDS sets `grace_seconds`, and so on."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    sidecar: str = ""
    """gRPC address of the sidecar: unix:/run/speculation/controller.sock, or host:port. Empty: the
    plugin is off and the engine runs as if it were not installed."""
    ca: str = ""
    """PEM file of the authority that signed the sidecar's certificate. If it is set, the connection
    uses TLS. For a sidecar on TCP."""
    client_certificate: str = ""
    """PEM file: the engine's own certificate for the sidecar."""
    client_key: str = ""
    """PEM file with the private key of that certificate."""
    token_file: str = ""
    """File with the token that identifies the engine in the sidecar's access list."""
    engine_id: str = Field(default="", pattern=r"^[A-Za-z0-9._:-]{0,128}$")
    """Name of this engine, stable across its restarts (for example the pod's name). Empty: the
    plugin makes one from the host name and the engine's port."""
    gammas: Annotated[tuple[int, ...], NoDecode] = (0, 1, 2, 3, 5, 7)
    """Draft lengths that the engine prepares and the sidecar may choose from, ascending, separated
    by commas. 0 is plain decoding."""
    grace_seconds: float = Field(default=10.0, ge=0, le=3600)
    """How long the last plan stays in use after its lease has expired, before the safe default is
    used."""
    lease_max_seconds: float = Field(default=600.0, ge=1, le=600)
    """Longest lease that the engine accepts. A longer lease is cut to this value, and the agent
    logs it. It has to be at least the sidecar's last_lease_seconds, which is at most 600."""
    safe_gamma: int | None = Field(default=None, ge=0, le=MAX_GAMMA)
    """Draft length of an engine without a plan. Unset: the one it started with."""
    report_buffer: int = Field(default=256, ge=1, le=65_536)
    """Number of step reports that the agent keeps while the sidecar is unavailable: the newest are
    kept, the others are counted as dropped."""
    report_interval_ms: float = Field(default=1.0, ge=0, le=250)
    """How often the agent polls for reports while steps follow each other. 0: every report wakes
    the agent at once, which costs time of the engine's thread in each step. About 20 saves
    processor time on a machine with few free cores, and delays the reports by that time."""
    agent_nice: int = Field(default=19, ge=0, le=19)
    """Added to the engine's niceness for the agent process. At 19 a woken agent does not preempt
    the engine's threads, even if no core is free. Lower it if reports are dropped because all cores
    are always busy."""

    @field_validator("gammas", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(","))
        return value

    @field_validator("gammas")
    @classmethod
    def _check_gammas(cls, gammas: tuple[int, ...]) -> tuple[int, ...]:
        if not gammas or list(gammas) != sorted(set(gammas)):
            raise ValueError("draft lengths are needed, ascending and without duplicates")
        if gammas[0] < 0 or gammas[-1] > MAX_GAMMA:
            raise ValueError(f"draft lengths must be in [0, {MAX_GAMMA}]")
        return gammas

    @field_validator("sidecar")
    @classmethod
    def _check_sidecar(cls, sidecar: str) -> str:
        if sidecar and not re.fullmatch(r"unix:.+|[^\s/]+:\d{1,5}", sidecar):
            raise ValueError("must be unix:<path> or <host>:<port>")
        return sidecar

    @model_validator(mode="after")
    def _check_credentials(self) -> Self:
        if bool(self.client_certificate) != bool(self.client_key):
            raise ValueError("a client certificate and its key must be set together")
        if self.client_certificate and not self.ca:
            raise ValueError("a client certificate requires TLS: set SPECULATION_CA")
        if self.token_file and not (self.ca or is_local_address(self.sidecar)):
            raise ValueError("the token would be sent unencrypted: set SPECULATION_CA")
        return self

    @classmethod
    def load(cls) -> Self:
        """Reads the settings from the environment.

        Raises LinkSettingsError for an unknown variable with the prefix, unless Kubernetes has set
        it for a Service, and for an invalid value.
        """
        fields = {PREFIX + name.upper() for name in cls.model_fields}
        # For example, a Service named "speculation-router" sets variables that are not settings.
        service_link_names = service_links(os.environ)
        for variable in sorted(os.environ.keys() - service_link_names):
            if variable.startswith(PREFIX) and variable not in fields:
                close_matches = difflib.get_close_matches(variable, fields, n=1, cutoff=0.85)
                known_names = ", ".join(sorted(fields))
                hint = (
                    f"did you mean {close_matches[0]}?"
                    if close_matches
                    else f"known: {known_names}"
                )
                raise LinkSettingsError(f"unknown setting {variable}: {hint}")
        try:
            return cls()
        except ValidationError as error:
            raise LinkSettingsError(_format_validation_error(error)) from error


def _format_validation_error(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False):
        if not item["loc"]:
            lines.append(item["msg"])
            continue
        name = PREFIX + str(item["loc"][0]).upper()
        lines.append(f"{name}={os.environ.get(name, '')!r}: {item['msg']}")
    return "; ".join(lines)
