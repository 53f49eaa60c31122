"""Settings of the sidecar: one file, overridden by the environment, overridden by flags.

Every field is a key of the YAML file and an environment variable with the prefix CONTROLLER_.  The
decision's constants are a group, `planner:` in the file and CONTROLLER_PLANNER__ (two underscores)
in the environment; so are those of training.  Unknown names are refused in every source.
"""

import dataclasses
import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

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
from controller.core.settings import PlannerSettings
from controller.core.training.selective_training import TrainingSettings
from controller.settings.listeners import Listener, port_conflicts
from controller.settings.sources import (
    PREFIX,
    SettingsFile,
    SettingsFileError,
    Sources,
    read_settings_file,
    variable_name,
)
from controller.util.sockets import socket_path
from controller.util.suggestions import suggestion_text
from speculation.service_links import service_links

DEFAULT_ADDRESS = "unix:/run/speculation/controller.sock"

CONFIG_VARIABLE = f"{PREFIX}CONFIG"

# Settings that SIGHUP reloads; the others need a restart.
RELOADED = frozenset(
    {
        "drain_seconds", "last_lease_seconds", "log_level", "max_engines",
        "override_default_seconds", "override_max_seconds", "planner", "profiles", "ready_with",
        "session_idle_seconds", "training", "warm_start",
    }
)  # fmt: skip


class SettingsError(SpeculationError):
    """A setting is unknown or has an unusable value; the message has one line for each."""


def _parse_unix_address(address: str) -> str:
    address = f"unix:{address}" if address.startswith("/") else address
    if not address.startswith("unix:") or socket_path(address) == Path():
        raise ValueError(
            "must be a unix socket, unix:PATH or /PATH; to serve on TCP as well, set tcp (--tcp "
            "HOST:PORT)"
        )
    return address


def _check_host_port(address: str | None) -> str | None:
    if address is not None and not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:]+):\d{1,5}", address):
        raise ValueError("must be HOST:PORT")
    return address


def _parse_host(host: str) -> str:
    """Checks a host and removes its brackets.  Raises ValueError."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare or bare != host:
        try:
            ipaddress.IPv6Address(bare)
        except ValueError as error:
            raise ValueError(
                "must be an address or a name, without a port; :: is every address, IPv4 and IPv6"
            ) from error
    elif not re.fullmatch(r"[A-Za-z0-9._-]+", bare):
        raise ValueError("must be an address or a name; :: is every address, IPv4 and IPv6")
    return bare


def _check_http_url(endpoint: str | None) -> str | None:
    if endpoint is not None and not re.fullmatch(r"https?://[^\s/@?#]+:\d{1,5}", endpoint):
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    return endpoint


def _unknown_field_check(
    kind: type[PlannerSettings | TrainingSettings],
) -> Callable[[object], object]:
    field_names = {field.name for field in dataclasses.fields(kind)}

    def check(value: object) -> object:
        if isinstance(value, Mapping) and (unknown := sorted(set(value) - field_names)):
            texts = [f"{name}{_hint_text(name, field_names)}" for name in unknown]
            raise ValueError(f"unknown: {'; '.join(texts)}")
        return value

    return check


_Host: TypeAlias = Annotated[str, AfterValidator(_parse_host)]
_Port: TypeAlias = Annotated[int, Field(ge=0, le=65535)]


def _reread_file_field(content: str) -> Any:
    return Field(None, description=f"File with {content}, read again for every connection.")


class _Environment(EnvSettingsSource):
    """Reads the environment.  Lists are separated by colons, as in a shell, and not JSON."""

    def prepare_field_value(
        self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool
    ) -> Any:
        if field_name == "profiles" and isinstance(value, str):
            return [part for part in value.split(os.pathsep) if part]
        return super().prepare_field_value(field_name, field, value, value_is_complex)


class Settings(BaseSettings):
    """The settings of `controller serve`.  Use `Settings.load` to make them."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
    )

    address: Annotated[str, AfterValidator(_parse_unix_address)] = DEFAULT_ADDRESS
    """Unix socket to serve on, unix:PATH or /PATH."""
    operators_directory: Path | None = None
    """Directory of the operators' socket, which no engine should have; by default that of
    address."""
    tcp: Annotated[str | None, AfterValidator(_check_host_port)] = None
    """TCP address HOST:PORT to serve on as well; see access and tls_certificate."""
    access: Path | None = None
    """File with the access list: who may read, steer, measure, install, override."""
    policy: Path | None = None
    """File with policy: draft lengths and bounds without an end, which any override displaces; read
    again when it changes."""
    tls_certificate: Path | None = None
    """PEM file; TCP is then served with TLS."""
    tls_key: Path | None = None
    """PEM file with the private key."""
    tls_client_ca: Path | None = None
    """PEM file; clients then need a certificate of this authority."""
    metrics_host: _Host = "127.0.0.1"
    """Address of /metrics; `::` lets other hosts scrape it."""
    metrics_port: _Port = 9464
    """Port of /metrics; 0: no metrics."""
    page_host: _Host = "127.0.0.1"
    """Address of the web page."""
    page_port: _Port = 0
    """Port of the web page, which every user who reaches it may read; 0: no page."""
    # The kubelet calls at the pod's address.
    health_host: _Host = "::"
    """Address of the health port; `::` is every address, IPv4 and IPv6."""
    health_port: _Port = 0
    """TCP port that serves grpc.health.v1 and nothing else, unencrypted, for a kubelet's probes; 0:
    no port."""
    ready_with: Literal["profile", "roofline", "guess"] = "roofline"
    """Source of costs from which the SpeculationService is SERVING: a measured profile, the
    roofline of a known model on a known device, or a guess."""
    profiles: tuple[Path, ...] = ()
    """Profile files, or directories of them: separated by colons in the environment, a list in a
    file."""
    profile_directory: Path | None = None
    """Directory that keeps the profiles measured through this sidecar."""
    state_directory: Path | None = None
    """Directory of overrides and their audit; by default SOCKET.state beside the socket."""
    redis_url: SecretStr | None = None
    """The fleet's Redis: redis[s]://, redis[s]+sentinel://, redis[s]+cluster:// or unix://."""
    redis_user: str | None = None
    """User (ACL) of Redis."""
    redis_user_file: Path | None = _reread_file_field("the user (ACL) of Redis")
    redis_password: SecretStr | None = None
    """Password of Redis."""
    redis_password_file: Path | None = _reread_file_field("the password of Redis")
    redis_sentinel_user: str | None = None
    """User (ACL) of the Sentinels."""
    redis_sentinel_user_file: Path | None = _reread_file_field("the user (ACL) of the Sentinels")
    redis_sentinel_password: SecretStr | None = None
    """Password of the Sentinels; by default they get that of Redis."""
    redis_sentinel_password_file: Path | None = _reread_file_field("the password of the Sentinels")
    redis_ca: Path | None = _reread_file_field("the authorities of Redis and its Sentinels (PEM)")
    redis_client_certificate: Path | None = _reread_file_field(
        "the client certificate for them (PEM)"
    )
    redis_client_key: Path | None = _reread_file_field("its private key (PEM)")
    redis_namespace: str = Field("speculation", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Part of every key in Redis."""
    redis_replicas: int = Field(0, ge=0, le=16)
    """Replicas that must have an override before it counts as set."""
    warm_start: bool = True
    """New sessions begin from the acceptance estimates in the store."""
    override_default_seconds: float = Field(3600.0, gt=0)
    """Time to live of an override that is set without one."""
    override_max_seconds: float = Field(7 * 86_400.0, gt=0)
    """Longest time to live of an override that has an end."""
    max_engines: int = Field(1024, ge=1)
    """Most engines that are steered at a time."""
    session_idle_seconds: float = Field(600.0, gt=0)
    """Time after which a session without stream or message ends."""
    drain_seconds: float = Field(5.0, ge=0)
    """Longest wait for open calls after SIGTERM or SIGINT."""
    last_lease_seconds: float = Field(30.0, ge=0, le=600)
    """Lease of the last plan that every engine gets on SIGTERM, without probes; 0: engines keep the
    lease that they have."""
    max_message_bytes: int = Field(4 * 1024 * 1024, ge=64 * 1024, le=1 << 30)
    """Largest gRPC message, in both directions."""
    max_connections: int = Field(2048, ge=16, le=65_536)
    """Open connections per address; further ones are closed at once."""
    max_open_calls: int = Field(4096, ge=64, le=65_536)
    """Calls in progress, open streams included; further ones are refused."""
    reflection: bool = True
    """Serve gRPC reflection."""
    channelz: bool = False
    """Serve gRPC channelz, on the unix sockets only; needs the package's extra `channelz`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines that are written."""
    planner: Annotated[PlannerSettings, BeforeValidator(_unknown_field_check(PlannerSettings))] = (
        PlannerSettings()
    )
    """Constants of the decision."""
    training: Annotated[
        TrainingSettings, BeforeValidator(_unknown_field_check(TrainingSettings))
    ] = TrainingSettings()
    """When a drafter is trained beside its engine (TIDE)."""
    otlp_endpoint: Annotated[str | None, AfterValidator(_check_http_url)] = None
    """OpenTelemetry collector, http[s]://HOST:PORT (gRPC); needs the extra otel."""
    otlp_trace_ratio: float = Field(0.1, ge=0, le=1)
    """Share of traces (decisions, operators' calls) that are kept."""
    otlp_logs: bool = False
    """Send log lines to that collector as well."""
    record_directory: Path | None = None
    """Directory of recordings for `controller replay`; unset: nothing is recorded."""
    record_megabytes: int = Field(256, ge=1)
    """Largest size of the recordings; the oldest are deleted first."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 -- pydantic fixes the signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- pydantic fixes the signature
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- pydantic fixes the signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- pydantic fixes the signature
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Takes only what `read` has merged; pydantic-settings reads no file of its own."""
        return (init_settings,)

    @property
    def socket_path(self) -> Path:
        """Returns the path in `address`."""
        return socket_path(self.address)

    @property
    def state_path(self) -> Path:
        """Returns the directory that keeps overrides and their audit."""
        return self.state_directory or Path(f"{self.socket_path}.state")

    @property
    def listeners(self) -> list[Listener]:
        """Returns the TCP listeners that the settings enable."""
        optional_listeners = [self.listener(name) for name in ("metrics", "page", "health")]
        listeners = [listener for listener in optional_listeners if listener.port]
        if self.tcp is None:
            return listeners
        host, _, port = self.tcp.rpartition(":")
        return [Listener("tcp", host.strip("[]"), int(port)), *listeners]

    def listener(self, name: Literal["metrics", "page", "health"]) -> Listener:
        """Returns the address of one of these listeners; port 0: it is disabled."""
        return Listener(
            f"{name}_port", getattr(self, f"{name}_host"), getattr(self, f"{name}_port")
        )

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Self:
        """Returns the settings that `read` returns, without their sources."""
        return cls.read(flags, config)[0]

    @classmethod
    def read(
        cls, flags: Mapping[str, Any] | None = None, config: Path | None = None
    ) -> tuple[Self, Sources]:
        """Reads flags, the environment and the file, in this order of precedence.

        flags: None as a value means that a flag was not given.  config: the file; None: the one
        that CONTROLLER_CONFIG names, if any.  Raises SettingsError for unknown names and unusable
        values; the message names the source of each.
        """
        _refuse_unknown_variables(os.environ)
        if config is None and (config_path := os.environ.get(CONFIG_VARIABLE)):
            config = Path(config_path)
        try:
            file = None if config is None else read_settings_file(config)
        except SettingsFileError as error:
            raise SettingsError(str(error)) from error
        if file is not None:
            _check_file(file)
        given_flags = {name: value for name, value in (flags or {}).items() if value is not None}
        sources = Sources(given_flags, _Environment(cls)(), file)
        try:
            settings = cls(**sources.merged())
        except ValidationError as error:
            lines = [_error_line(item, sources) for item in error.errors(include_url=False)]
            raise SettingsError("\n".join(lines)) from error
        _refuse_conflicts(settings, sources)
        return settings, sources


GROUPS: Mapping[str, type[PlannerSettings | TrainingSettings]] = {
    "planner": PlannerSettings,
    "training": TrainingSettings,
}
# Not quoted in errors: a URL may contain a password.
_SECRETS = frozenset({"otlp_endpoint", "redis_password", "redis_sentinel_password", "redis_url"})
# Settings that need another setting.
_REQUIRED_WITH = {
    "tls_certificate": "tls_key",
    "tls_key": "tls_certificate",
    "tls_client_ca": "tls_certificate",
    **{
        name: "redis_url"
        for name in Settings.model_fields
        if name.startswith("redis_") and name != "redis_url"
    },
}

# Variables of commands that call a sidecar; the sidecar's own environment may have them too.
CLIENT_VARIABLES = frozenset(
    PREFIX + name for name in ("AUTHOR", "TOKEN_FILE", "CA", "CLIENT_CERTIFICATE", "CLIENT_KEY")
)


def setting_keys() -> Iterator[str]:
    """Yields all settings, dotted, in the order in which they are declared."""
    for name in Settings.model_fields:
        if name in GROUPS:
            yield from (f"{name}.{constant.name}" for constant in dataclasses.fields(GROUPS[name]))
        else:
            yield name


def setting_variables() -> frozenset[str]:
    """Returns the environment variables of all settings."""
    return frozenset(map(variable_name, setting_keys()))


def _error_line(item: ErrorDetails, sources: Sources) -> str:
    """Returns a line with a setting, its error, its value (unless secret) and its source."""
    path = item["loc"][:2] if item["loc"][0] in GROUPS else item["loc"][:1]
    key = ".".join(map(str, path))
    origin = sources.origin(key)
    shown = "" if key in _SECRETS or key in GROUPS else f"is {item['input']!r}"[:200]
    origin_text = "" if origin.kind == "default" else f"from {origin}"
    remark = ", ".join(part for part in (shown, origin_text) if part)
    message = item["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" + (f" ({remark})" if remark else "")


def _refuse_conflicts(settings: Settings, sources: Sources) -> None:
    faults = [
        f"{key}: needs {second_key} as well (from {sources.origin(key)})"
        for key, second_key in _REQUIRED_WITH.items()
        if getattr(settings, key) != _default_value(key) and getattr(settings, second_key) is None
    ]
    faults += [
        f"{text} (from {sources.origin(first_key)} and {sources.origin(second_key)})"
        for first_key, second_key, text in port_conflicts(settings.listeners)
    ]
    if faults:
        raise SettingsError("\n".join(faults))


def _check_file(file: SettingsFile) -> None:
    """Raises SettingsError for unknown keys, and for booleans that pydantic would take as 1."""
    known_keys, faults = [*setting_keys(), *GROUPS], []
    for key, line in file.lines.items():
        if key not in known_keys:
            close_matches = difflib.get_close_matches(key.replace("-", "_"), known_keys, 1)
            hint = (
                f"did you mean {close_matches[0]}?" if close_matches else "see `controller config`"
            )
            faults.append(f"{file.path}, line {line}: {key} is not a setting: {hint}")
            continue
        value: Any = file.values
        for name in key.split("."):
            value = value[name]
        # Pydantic would accept true as the number 1.
        if isinstance(value, bool) and not isinstance(_default_value(key), bool):
            faults.append(f"{file.path}, line {line}: {key} cannot be true or false")
    if faults:
        raise SettingsError("\n".join(faults))


def _default_value(key: str) -> Any:
    name, _, constant = key.partition(".")
    group = Settings.model_fields[name].default
    return getattr(group, constant) if constant else group


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    # For a Service named "controller" or "controller-manager", Kubernetes sets such variables too.
    known_names = setting_variables() | CLIENT_VARIABLES | {CONFIG_VARIABLE}
    links = service_links(environment)
    unknown = [
        name
        for name in sorted(environment)
        # pydantic-settings ignores the case of names.
        if name.upper().startswith(PREFIX) and name not in known_names and name not in links
    ]
    if unknown:
        lines = [
            f"unknown environment variable {name}{_hint_text(name.upper(), known_names)}"
            for name in unknown
        ]
        raise SettingsError("\n".join(lines))


def _hint_text(name: str, known_names: Iterable[str]) -> str:
    """Returns the end of an error text about an unknown name."""
    return f": {suggestion_text(name, known_names)} (`controller config` lists all)"
