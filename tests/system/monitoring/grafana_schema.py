"""Grafana's published model of a dashboard, taken strictly: each key is known, each value fits."""

import enum
import json
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

_MODELS = "grafana_foundation_sdk.models."


def faults(dashboard: dict[str, Any]) -> list[str]:
    """What the model does not know of the dashboard, and what does not have the model's type."""
    # Options and queries are read by the model of their panel's type.
    register_default_plugins()
    read = Dashboard.from_json(dashboard)
    written = json.loads(json.dumps(read, cls=JSONEncoder))
    return [*_lost(dashboard, written, "dashboard"), *_unfit(read, Dashboard, "dashboard")]


def _lost(original: Any, kept: Any, where: str) -> Iterator[str]:
    """Keys and values that the model did not take over."""
    if isinstance(original, dict) and isinstance(kept, dict):
        for key, value in original.items():
            if key in kept:
                yield from _lost(value, kept[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}: unknown"
    elif isinstance(original, list) and isinstance(kept, list) and len(original) == len(kept):
        for index, (before, after) in enumerate(zip(original, kept, strict=True)):
            yield from _lost(before, after, f"{where}[{index}]")
    elif original != kept:
        yield f"{where}: {original!r} became {kept!r}"


def _unfit(value: Any, hint: Any, where: str) -> Iterator[str]:
    """Values that do not have the type of the hint, in all that the value holds."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        misfits_by_type = [list(_unfit(value, one, where)) for one in arguments]
        yield from min(misfits_by_type, key=len)
    elif origin is list and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unfit(item, arguments[0], f"{where}[{index}]")
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _unfit(item, arguments[1], f"{where}.{key}")
    elif type(value).__module__.startswith(_MODELS) and not isinstance(value, enum.Enum):
        if isinstance(hint, type) and not isinstance(value, hint):
            yield f"{where}: {type(value).__name__} is no {hint.__name__}"
        for name, inner in get_type_hints(type(value).__init__).items():
            if name != "return":
                yield from _unfit(getattr(value, name), inner, f"{where}.{name}")
    elif not _fits(value, hint):
        yield f"{where}: {value!r} is no {getattr(hint, '__name__', hint)}"


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    kind = get_origin(hint) or hint
    if kind in {Any, object}:
        return True
    if kind in {float, int}:
        return isinstance(value, int | kind) and not isinstance(value, bool)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return value in [member.value for member in kind]
    return isinstance(value, kind)
