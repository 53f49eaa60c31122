"""Explains the errors of Redis, and what to do about them."""

import os
import re
import ssl
from collections.abc import Callable, Iterator
from typing import Final

import redis.exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from controller.core.errors import MALFORMED_JSON_ERRORS
from controller.store.redis_connections import UnusableFileError

# The errors of redis-py; those of a cluster are not subclasses of RedisError.
REDIS_ERRORS = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException)
# Errors of a command that Redis, or a cluster, refused before executing it.
_BEFORE_ANY_WRITE = (
    redis.exceptions.AskError,
    redis.exceptions.AuthenticationError,
    redis.exceptions.BusyLoadingError,
    # Includes a command that a cluster redirected from node to node without executing it.
    redis.exceptions.ClusterError,
    redis.exceptions.MaxConnectionsError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.SlotNotCoveredError,
    redis.exceptions.TryAgainError,
    MasterNotFoundError,
)
# Such errors without a class of their own: too few replicas, or a snapshot cannot be written.
_REFUSED_WRITES = ("NOREPLICAS", "MISCONF")
# Characters of a server's error text that are shown.
_WORDS_MAX: Final = 200
# Length of the cause chain that is examined: redis-py wraps errors in its own.
_CHAIN_MAX: Final = 8
# X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL.
_OTHER_NAME: Final = frozenset({62, 64})
# With TLS 1.3, a server without a client certificate may close before its reason is read.
_CLOSED: Final = (
    "read its log, and check if it expects TLS or a client certificate (redis_client_certificate)"
)
_CLIENT_CERTIFICATE: Final = "set redis_client_certificate and redis_client_key"
_SEE_NETWORK: Final = (
    "check that it runs, that redis_url is correct (port, TLS), and that the network reaches it"
)
# Part of an error's text, what is wrong ("" for the text itself), and what to do.
_KNOWN_FAULTS: Final = (
    ("wrong version number", "does not speak TLS", "correct redis_url: its port, or the scheme"),
    ("record layer failure", "does not speak TLS", "correct redis_url: its port, or the scheme"),
    ("certificate required", "asks for a client certificate", _CLIENT_CERTIFICATE),
    ("handshake failure", "refuses the TLS handshake, perhaps for lack of a client certificate",
     _CLIENT_CERTIFICATE),
    ("alert unknown ca", "does not trust the client certificate",
     "correct redis_client_certificate"),
    ("alert bad certificate", "refuses the client certificate", "correct redis_client_certificate"),
    ("alert certificate", "refuses the client certificate", "correct redis_client_certificate"),
    ("closed by server", "closed the connection", _CLOSED),
    ("reset by peer", "closed the connection", _CLOSED),
    ("connection lost", "closed the connection", _CLOSED),
    ("broken pipe", "closed the connection", _CLOSED),
    ("unknown command sentinel", "is not a Sentinel",
     "correct the hosts and ports in redis_url, or its scheme"),
    ("unknown command", "", "correct redis_url: a Sentinel has the scheme redis+sentinel"),
    ("cluster support disabled", "is not a cluster", "correct the scheme in redis_url"),
    ("not allowed in cluster mode", "is a cluster", "use the scheme redis+cluster in redis_url"),
    ("db index is out of range", "", "correct the database in redis_url"),
    ("too many connections", "needs more connections than max_connections allows",
     "raise max_connections in redis_url, or remove it"),
    ("protected mode", "refuses other hosts because it has no password (protected mode)",
     "give Redis a password, and set redis_password or redis_password_file"),
)  # fmt: skip


class NoPrimaryError(MasterNotFoundError):
    """No Sentinel names the primary.  reason, fix: texts for all Sentinels."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


def is_out_of_memory(error: Exception) -> bool:
    """Whether Redis refused a write because it is out of memory."""
    return isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in str(error)


def is_before_any_write(error: Exception) -> bool:
    """Whether the error was raised before Redis executed the command."""
    connecting = isinstance(error, redis.exceptions.ConnectionError) and "connecting" in str(error)
    refused = isinstance(error, _BEFORE_ANY_WRITE) or str(error).startswith(_REFUSED_WRITES)
    # The client wraps some of its own errors in others.
    has_unusable_file = any(isinstance(cause, UnusableFileError) for cause in _cause_chain(error))
    return connecting or refused or has_unusable_file or is_out_of_memory(error)


def error_text(error: Exception, redacted: Callable[[str], str]) -> str:
    """Returns what is wrong and what to do.  redacted: removes secrets from a server's text."""
    reason, fix = explain_error(error)
    return "; ".join(part for part in (redacted(reason), fix) if part)


def explain_error(error: Exception, setting: str = "redis_") -> tuple[str, str]:
    """Returns what is wrong, and what to do ("" if unknown).

    The first text may contain credentials of the URL; redact it before showing it.  setting: prefix
    of the names of the credentials' settings.
    """
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return "takes no writes (read-only)", ""
    if is_out_of_memory(error):
        return "takes no writes (out of memory)", ""
    causes = list(_cause_chain(error))
    for explanation in (
        *(_by_class(cause, setting) for cause in causes),
        *(_by_text(cause) for cause in causes),
        *(_unreachable(cause) for cause in causes if "connecting" in str(error)),
    ):
        if explanation is not None:
            return explanation
    if isinstance(error, MALFORMED_JSON_ERRORS):
        return f"its reply cannot be read ({type(error).__name__})", ""
    is_unreachable = isinstance(error, redis.exceptions.ConnectionError | OSError)
    return _printable_error(error), _SEE_NETWORK if is_unreachable else ""


def _by_class(error: BaseException, setting: str) -> tuple[str, str] | None:
    explanation: tuple[str, str] | None = None
    match error:
        case NoPrimaryError():
            explanation = error.reason, error.fix
        case UnusableFileError():
            explanation = _printable_error(error), ""
        case redis.exceptions.AuthenticationError():
            explanation = _credentials_fault(error, setting)
        case redis.exceptions.NoPermissionError():
            fix = "grant its user the rights that docs/fleet.md lists"
            explanation = f"does not permit it (NOPERM): {_printable_error(error)}", fix
        case redis.exceptions.MovedError():
            explanation = "is a node of a cluster", "use the scheme redis+cluster in redis_url"
        case ssl.SSLCertVerificationError():
            explanation = _certificate_fault(error)
        case TimeoutError() | redis.exceptions.TimeoutError():
            explanation = "does not answer in time", _SEE_NETWORK
    return explanation


def _by_text(error: BaseException) -> tuple[str, str] | None:
    text = re.sub(r"[\W_]+", " ", str(error)).lower()
    return next(
        (
            (reason or _printable_error(error), fix)
            for part, reason, fix in _KNOWN_FAULTS
            if part in text
        ),
        None,
    )


def _unreachable(error: BaseException) -> tuple[str, str] | None:
    if not isinstance(error, OSError):
        return None
    number = error.errno or 0
    # For an unknown host name, the number is negative and the error has its own text.
    reason = os.strerror(number) if number > 0 else error.strerror or _printable_error(error)
    return f"cannot be reached ({reason})", _SEE_NETWORK


def _cause_chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and its causes."""
    cause: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _credentials_fault(error: BaseException, setting: str) -> tuple[str, str]:
    text = str(error).lower()
    both = f"{setting}user and {setting}password, or their files"
    if "required" in text:
        return "requires a password (NOAUTH)", f"set {setting}password or {setting}password_file"
    if "without any password" in text or "no password is set" in text:
        return "has no password, but was given one", f"remove {both}"
    if setting == "redis_":
        return "refuses the user or the password (WRONGPASS)", f"correct {both}"
    return (
        "refuses the user or the password (WRONGPASS)",
        f"set {both}; by default the password of Redis is used",
    )


def _certificate_fault(error: ssl.SSLCertVerificationError) -> tuple[str, str]:
    message = error.verify_message
    if error.verify_code in _OTHER_NAME:
        return (
            f"its certificate has another name: {message}",
            "use the host name of its certificate",
        )
    if "expired" in message or "not yet valid" in message:
        return (
            f"its certificate is not valid: {message}",
            "renew it, or correct this machine's clock",
        )
    return f"its certificate is not trusted: {message}", "set redis_ca to its authority's PEM file"


def _printable_error(error: BaseException) -> str:
    """Returns an error's text on one line, without unprintable characters."""
    text_line = " ".join(str(error).split())[:_WORDS_MAX]
    text = "".join(letter if letter.isprintable() else "?" for letter in text_line)
    return text or type(error).__name__
