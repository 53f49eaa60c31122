"""Settings of the plugin: those of the link, and its own."""

from pydantic import Field

from engine_shim.link.errors import LinkSettingsError
from engine_shim.link.settings import LinkSettings
from engine_shim.sglang.errors import PluginError


class PluginSettings(LinkSettings):
    """One field for each SPECULATION_* variable."""

    allow_unknown_version: bool = Field(
        default=False,
        description="Start on an SGLang version that this plugin was not tested with. Its "
        "self-check still runs.",
    )
    dflash_model_path: str = Field(
        default="",
        description="A DFlash checkpoint for the same target: it is loaded beside the engine's "
        "own drafter, and the sidecar chooses between them at every step.",
    )
    dflash_revision: str = Field(
        default="", description="Revision of the DFlash checkpoint on the model hub."
    )
    sleep_positions: int = Field(
        default=32,
        ge=0,
        le=4096,
        description="Positions of each request that a sleeping drafter may miss before they are "
        "caught up in one pass. 0: the drafter never sleeps.",
    )


def load_settings() -> PluginSettings:
    """Settings from the environment.  Raises PluginError."""
    try:
        return PluginSettings.load()
    except LinkSettingsError as error:
        raise PluginError(str(error)) from error
