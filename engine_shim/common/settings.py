"""Settings that every shim has besides those of the link."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Self

from engine_shim.common.checks import Check, require_no_obstacle
from engine_shim.common.errors import PluginError
from engine_shim.link.errors import LinkSettingsError
from engine_shim.link.settings import LinkSettings

_log = logging.getLogger(__name__)


class ShimSettings(LinkSettings):
    """Settings from SPECULATION_* variables; a shim adds its own fields."""

    allow_unknown_version: bool = False
    """Start on a version of the engine that this plugin was not tested with. Its self-check still
    runs."""

    @classmethod
    def load_or_raise(cls) -> Self:
        """Reads the settings from the environment.  Raises PluginError."""
        try:
            return cls.load()
        except LinkSettingsError as error:
            raise PluginError(str(error)) from error

    def version_check(
        self, engine: str, installed: str, tested: Sequence[str], compatible: Sequence[str] = ()
    ) -> Check:
        """Checks whether the plugin supports a version of its engine.

        engine: its display name.  installed: the installed version, "" if it is unknown.
        compatible: versions that the tests do not run, but whose source has everything that the
        plugin uses.
        """
        is_known = installed in tested or installed in compatible or self.allow_unknown_version
        return Check(
            f"version of {engine}",
            installed or "unknown",
            ""
            if is_known
            else f"{engine} {installed or 'of unknown version'} is installed, the plugin is tested "
            f"with {' and '.join(tested)}; SPECULATION_ALLOW_UNKNOWN_VERSION=1 tries anyway",
        )

    def require_version(
        self, engine: str, installed: str, tested: Sequence[str], compatible: Sequence[str] = ()
    ) -> None:
        """Raises UnsupportedEngineError for a version that the plugin does not support.

        The arguments are those of `version_check`; a version in `compatible` causes a warning.
        """
        require_no_obstacle([self.version_check(engine, installed, tested, compatible)])
        if installed in compatible:
            _log.warning(
                "%s %s has what the plugin uses, and the plugin's tests do not run it: they run %s",
                engine, installed, " and ".join(tested),
            )  # fmt: skip
