"""Settings that every shim has besides those of the link."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from engine_shim.link.errors import LinkSettingsError
from engine_shim.link.settings import LinkSettings
from engine_shim.steering.errors import PluginError, UnsupportedEngineError


class ShimSettings(LinkSettings):
    """One field for each SPECULATION_* variable; a shim adds its own."""

    allow_unknown_version: bool = Field(
        default=False,
        description="Start on a version of the engine that this plugin was not tested with. Its "
        "self-check still runs.",
    )

    @classmethod
    def load_or_refuse(cls) -> Self:
        """Settings from the environment.  Raises PluginError."""
        try:
            return cls.load()
        except LinkSettingsError as error:
            raise PluginError(str(error)) from error

    def require_version(self, engine: str, found: str, tested: tuple[str, ...]) -> None:
        """Raises UnsupportedEngineError for a version that the plugin was not tested with.

        engine: its name for people.  found: "" if it is not known.
        """
        if found in tested or self.allow_unknown_version:
            return
        raise UnsupportedEngineError(
            f"{engine} {found or 'of unknown version'} is installed, the plugin is tested with "
            f"{' and '.join(tested)}; SPECULATION_ALLOW_UNKNOWN_VERSION=1 tries anyway"
        )
