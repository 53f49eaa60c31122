"""Removes the credentials of URLs from texts that are shown, logged or raised."""

import json
import re
from collections.abc import Iterator
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?"
# Hosts, and a path of at most two parts: what may be shown.
_PLACE = re.compile(rf"{_HOST}(?:,{_HOST})*(?:/[A-Za-z0-9._-]*){{0,2}}")
# A unix socket, whose URL has no host.
_SOCKET = re.compile(r"(?:/[A-Za-z0-9._-]+)+")
# Values of a query, such as a database or a switch, that are no secrets unless they are called so.
_PLAIN = re.compile(r"[0-9.]{1,5}|true|false|yes|no|none", re.IGNORECASE)
_DELIMITERS = re.compile(r"[:/@?#&=;,]")


def redact(text: str, url: str) -> str:
    """Returns `text` without the credentials of `url`: verbatim, decoded or quoted.

    The URL itself becomes its scheme, hosts and path.  If it is unclear which part of it is a
    credential, only the scheme is kept.  `redact(url, url)` is the URL as it may be shown.
    """
    if not url:
        return text
    shown, secrets = _shown(url), sorted(_secrets(url), key=len, reverse=True)
    hide = re.compile("|".join(map(re.escape, secrets))) if secrets else None
    pieces = text.split(url)
    return shown.join(hide.sub(HIDDEN, piece) if hide else piece for piece in pieces)


def _shown(url: str) -> str:
    scheme, found, rest = url.partition("://")
    if not (found and _SCHEME.fullmatch(scheme)):
        return HIDDEN
    place = _place(scheme, rest)
    if place is None:
        return f"{scheme}://{HIDDEN}"
    before, query = _split(rest)
    return f"{scheme}://{f'{HIDDEN}@' * ('@' in before)}{place}{f'?{HIDDEN}' * bool(query)}"


def _split(rest: str) -> tuple[str, str]:
    """Returns the part before the query or fragment, and the query with what follows it."""
    match = re.search(r"[?#]", rest)
    return (rest[: match.start()], rest[match.end() :]) if match else (rest, "")


def _place(scheme: str, rest: str) -> str | None:
    """Returns hosts and path, or None if a credential may be among them."""
    known = _SOCKET if scheme == "unix" else _PLACE
    before, query = _split(rest)
    place = before.rpartition("@")[2]
    # An @ after a ? may end a password that has a ? in it.
    return place if "@" not in query and known.fullmatch(place) else None


def _secrets(url: str) -> set[str]:
    scheme, _, rest = url.partition("://")
    rest = rest or url
    if _place(scheme, rest) is None:
        parts = [rest, *_DELIMITERS.split(rest)]
    else:
        before, query = _split(rest)
        account = before.rpartition("@")[0]
        user, _, password = account.partition(":")
        # An exception may quote what stood between two delimiters.
        parts = [account, user, password, *_DELIMITERS.split(account), *_values(query)]
    return {form for part in parts for form in _forms(part) if form}


def _values(query: str) -> Iterator[str]:
    for pair in re.split(r"[&;#]", query):
        name, _, value = pair.partition("=")
        if not _PLAIN.fullmatch(value) or re.search(r"pass|user|auth|token|key", name):
            yield value


def _forms(secret: str) -> Iterator[str]:
    for plain in (secret, unquote(secret), unquote_plus(secret)):
        yield plain
        yield quote(plain, safe="")
        yield quote_plus(plain, safe="")
        # As repr and JSON write it.
        yield repr(plain)[1:-1]
        yield json.dumps(plain)[1:-1]
