"""Settings of the sidecar: flags before environment before defaults; unknown keys are refused.

Every field is an environment variable with the prefix CONTROLLER_, the decision's constants with
CONTROLLER_PLANNER__ (two underscores), those of training with CONTROLLER_TRAINING__.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from controller.core.errors import SpeculationError
from controller.core.selective_training import TrainingSettings
from controller.core.settings import PlannerSettings

PREFIX = "CONTROLLER_"
DEFAULT_ADDRESS = "unix:/run/speculation/controller.sock"

# What Kubernetes puts into every pod when a Service is named "controller": not ours, not refused.
_SERVICE_LINK = re.compile(
    r"CONTROLLER_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


class SettingsError(SpeculationError):
    """A setting that is unknown or cannot be; one line for each."""


def _is_unix(address: str) -> str:
    if not address.startswith("unix:") or not address.removeprefix("unix:"):
        raise ValueError("unix:PATH is needed")
    return address


def _is_host_port(address: str | None) -> str | None:
    if address is not None and not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:]+):\d{1,5}", address):
        raise ValueError("HOST:PORT is needed")
    return address


def _known_by(kind: type[PlannerSettings | TrainingSettings]) -> Callable[[object], object]:
    known = {field.name for field in dataclasses.fields(kind)}

    def check(value: object) -> object:
        if isinstance(value, Mapping) and (unknown := sorted(set(value) - known)):
            raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return value

    return check


class _Environment(EnvSettingsSource):
    """The environment, with lists as everywhere in a shell: separated by colons, not as JSON."""

    def prepare_field_value(
        self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool
    ) -> Any:
        if field_name == "profiles" and isinstance(value, str):
            return [part for part in value.split(os.pathsep) if part]
        return super().prepare_field_value(field_name, field, value, value_is_complex)


class Settings(BaseSettings):
    """What `controller serve` runs with.  `Settings.load` is the way to make one."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    address: Annotated[str, AfterValidator(_is_unix)] = Field(
        DEFAULT_ADDRESS, description="Unix socket to serve on, unix:PATH."
    )
    tcp: Annotated[str | None, AfterValidator(_is_host_port)] = Field(
        None, description="HOST:PORT to serve on as well; see access and tls_certificate."
    )
    access: Path | None = Field(
        None, description="Access list for TCP: who may read, steer and override."
    )
    tls_certificate: Path | None = Field(None, description="PEM file: TCP is served with TLS.")
    tls_key: Path | None = Field(None, description="PEM file with its private key.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file: clients need a certificate of this authority."
    )
    metrics_host: str = Field(
        "127.0.0.1", description="Address of /metrics; 0.0.0.0 lets another host scrape it."
    )
    metrics_port: int = Field(9464, ge=0, le=65535, description="Port of /metrics; 0: none.")
    profiles: tuple[Path, ...] = Field(
        (), description="Profile files, or directories of them; separated by colons."
    )
    profile_directory: Path | None = Field(
        None, description="Where profiles measured through this sidecar are kept, and found again."
    )
    state_directory: Path | None = Field(
        None,
        description="Where overrides and their audit are kept; by default SOCKET.state beside the "
        "socket.",
    )
    redis_url: SecretStr | None = Field(
        None,
        description="The fleet's Redis: redis[s]://, redis[s]+sentinel:// or redis[s]+cluster://.",
    )
    redis_password_file: Path | None = Field(
        None, description="File with its password, read again for every connection."
    )
    redis_namespace: str = Field(
        "speculation", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Part of every key there."
    )
    redis_replicas: int = Field(
        0, ge=0, le=16, description="Replicas that must have an override before it counts as set."
    )
    warm_start: bool = Field(
        default=True,
        description="Fresh sessions begin from acceptance estimates kept in the store.",
    )
    override_default_seconds: float = Field(
        3600.0, gt=0, description="How long an override stays for which nothing is said."
    )
    override_max_seconds: float = Field(
        7 * 86_400.0, gt=0, description="Longest time to live; beyond it is for ever, explicitly."
    )
    max_engines: int = Field(1024, ge=1, description="Engines steered at a time.")
    session_idle_seconds: float = Field(
        600.0, gt=0, description="A session without stream or message ends after this time."
    )
    drain_seconds: float = Field(
        5.0, ge=0, description="Longest wait for open calls when asked to stop."
    )
    max_message_bytes: int = Field(
        4 * 1024 * 1024, ge=64 * 1024, description="Largest gRPC message, either way."
    )
    reflection: bool = Field(default=True, description="Serve gRPC reflection.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level of a log line."
    )
    planner: Annotated[PlannerSettings, BeforeValidator(_known_by(PlannerSettings))] = Field(
        PlannerSettings(), description="Constants of the decision."
    )
    training: Annotated[TrainingSettings, BeforeValidator(_known_by(TrainingSettings))] = Field(
        TrainingSettings(), description="When a drafter is trained beside its engine (TIDE)."
    )
    record_directory: Path | None = Field(
        None, description="Where decisions are recorded, for `controller replay`; by default not."
    )
    record_megabytes: int = Field(
        256, ge=1, description="What that directory may hold; the oldest goes first."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- pydantic fixes the signature
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- pydantic fixes the signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- pydantic fixes the signature
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment; no hidden files."""
        return init_settings, _Environment(settings_cls)

    @property
    def socket_path(self) -> Path:
        """The path in `address`."""
        return Path(self.address.removeprefix("unix:").removeprefix("//"))

    @property
    def state_path(self) -> Path:
        """Where state is kept."""
        return self.state_directory or Path(f"{self.socket_path}.state")

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None) -> Self:
        """Flags (None: not given) over the environment over the defaults.

        Raises SettingsError for unknown variables and values that cannot be.
        """
        _refuse_unknown(os.environ)
        given = {name: value for name, value in (flags or {}).items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as error:
            lines = [
                f"{'.'.join(map(str, item['loc'])) or 'settings'}: {item['msg']}{_shown(item)}"
                for item in error.errors(include_url=False)
            ]
            raise SettingsError("\n".join(lines)) from error


def _shown(item: ErrorDetails) -> str:
    """What was given, unless it is a secret."""
    return "" if "redis_url" in item["loc"] else f" (is {item['input']!r})"


# Read by commands that call a sidecar; they may be set where one serves.
CLIENT_VARIABLES = frozenset(
    PREFIX + name for name in ("AUTHOR", "TOKEN_FILE", "CA", "CLIENT_CERTIFICATE", "CLIENT_KEY")
)


def variables() -> frozenset[str]:
    """The environment variables that mean something."""
    groups = {"planner": PlannerSettings, "training": TrainingSettings}
    return frozenset(
        {f"{PREFIX}{name}".upper() for name in Settings.model_fields if name not in groups}
        | {
            f"{PREFIX}{name}__{constant.name}".upper()
            for name, group in groups.items()
            for constant in dataclasses.fields(group)
        }
    )


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    known = variables() | CLIENT_VARIABLES
    unknown = [
        name
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name)
    ]
    if unknown:
        raise SettingsError(
            f"unknown environment variables: {', '.join(unknown)}; known are "
            f"{', '.join(sorted(known))}"
        )
