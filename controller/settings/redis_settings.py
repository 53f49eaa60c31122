"""Reads the settings of the Redis of a fleet."""

import dataclasses
from typing import Any

from pydantic import SecretStr

from controller.settings.settings import Settings
from controller.store.redis_url import RedisAccess


def redis_access(settings: Settings) -> RedisAccess:
    """Returns the settings that open Redis in addition to its URL: redis_user, redis_ca and so on.

    Line breaks at the end of a user or password, which `echo` and YAML add, are removed.
    """
    names = [field.name for field in dataclasses.fields(RedisAccess)]
    values: dict[str, Any] = {name: getattr(settings, f"redis_{name}") for name in names}
    secrets = {n: v.get_secret_value() for n, v in values.items() if isinstance(v, SecretStr)}
    values |= secrets
    texts = {n: v.rstrip("\r\n") for n, v in values.items() if isinstance(v, str)}
    return RedisAccess(**(values | texts))
