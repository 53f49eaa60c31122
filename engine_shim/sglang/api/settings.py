"""Settings of the plugin: those of every shim, and its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from engine_shim.common.settings import ShimSettings

if TYPE_CHECKING:
    from engine_shim.sglang.training.online import OnlineSettings


class PluginSettings(ShimSettings):
    """One field for each SPECULATION_* variable."""

    dflash_model_path: str = ""
    """A DFlash checkpoint for the same target: it is loaded beside the engine's own drafter, and
    the sidecar chooses between them at every step."""
    dflash_revision: str = ""
    """Revision of the DFlash checkpoint on the model hub."""
    require_drafters: bool = False
    """Do not start when the DFlash drafter beside the engine's own cannot draft its first block. By
    default the engine starts with its own drafter alone, logs an error, and tells the sidecar."""
    lookup: bool = False
    """Draft by prompt lookup (n-gram) too: alone, and in a mixture with every drafter of the
    engine, in which each row of a step gets the proposal that promises more. A request is compared
    with its own tokens only."""
    classes: Annotated[
        tuple[Literal["grammar", "temperature", "prompt", "adapter", "label"], ...], NoDecode
    ] = ()
    """By what requests are divided into classes, so that the sidecar estimates the acceptance of
    each class: grammar (JSON schema, tool call, other grammars), temperature (greedy, below 0.7,
    above), prompt (a keyed hash of the first tokens), adapter (name of the LoRA adapter), label
    (what the client sends as speculation_class), separated by commas."""
    class_key_file: str = ""
    """File with the key of that hash, 16 bytes or more. Who knows the key and a label can try out
    which prompt it is."""
    class_prompt_tokens: int = Field(default=64, ge=8, le=4096)
    """First tokens of a prompt that the hash is of. Shorter prompts have no such class."""
    graph_limits: Annotated[dict[int, int], NoDecode] = Field(default={})
    """Draft lengths that shall get graphs for small batches only, as gamma:largest batch, separated
    by commas: less memory, and a quicker start. The sidecar plans them for no larger batch.
    `controller profile show` prints those that a profile gives reason for."""
    sleep_positions: int = Field(default=32, ge=0, le=4096)
    """Steps that a sleeping drafter may miss before it catches up in one pass. 0: the drafter never
    sleeps."""

    online_updates: bool = False
    """Start a trainer that updates the drafter while it serves, when the plan asks for it."""
    online_scope: Literal["shared", "request"] = "shared"
    """`request`: the drafter is as it was loaded when a request begins, and learns only while one
    request runs alone."""
    online_learning_rate: float = 1e-3
    """Learning rate of AdamW in online updates."""
    online_proximal: float = 0.0
    """Weight of staying near the drafter as it was when the round began; counts from the second
    optimiser step of a round on."""
    online_discount: float | None = None
    """Weight of a draft position, relative to the one before it. Unset: as the drafter was trained,
    0.8 for EAGLE3 and MTP, exp(-2 / block) for DFlash."""
    online_steps: int = 1
    """Optimiser steps of a round of online updates."""
    online_anchors: int = 16
    """Positions of each request that a round drafts from, the newest."""
    online_window: int = 256
    """Positions of each request, the newest, that a round's drafts attend to; those of at most 16
    requests are kept."""
    online_megabytes: int = Field(default=1024, ge=1)
    """Most megabytes of the host's memory that these positions may take. A window that needs more
    is refused at the start."""

    online_device: str = Field(default="", pattern=r"^(|cpu|cuda(:\d+)?)$")
    """Where the trainer of online updates computes, as torch names it. Empty: where the engine
    does, which then needs free memory there for 16 bytes a parameter and more."""

    learner: str = ""
    """Name of the drafter that learns, by online updates or from a trainer: `dflash` for the second
    one beside the engine's own. Empty: the engine's own."""
    signals_folder: str = ""
    """Where training signals are written when the plan asks for it (`controller override set
    --regime collect`). Empty: nowhere."""
    signals_megabytes: int = Field(default=1024, ge=1)
    """Most megabytes that the folder may hold. Beyond them the oldest signals are deleted."""
    signals_device_megabytes: int = Field(default=256, ge=1)
    """Most megabytes of the device's memory that rounds may take until they have been read. Rounds
    that find no room are dropped and counted."""
    signals_top: int = Field(default=64, ge=1, le=1024)
    """Number of the target's likeliest tokens that are kept of a position."""
    signals_final_states: bool = False
    """Keep the target's last hidden states too, which SpecForge's offline trainer of EAGLE3
    drafters asks for."""

    @property
    def online(self) -> OnlineSettings:
        """Returns the trainer's settings.  Raises ValueError."""
        from engine_shim.sglang.training.online import OnlineSettings

        return OnlineSettings(
            learning_rate=self.online_learning_rate,
            proximal=self.online_proximal,
            discount=self.online_discount,
            steps=self.online_steps,
            anchors=self.online_anchors,
            window=self.online_window,
        )

    @field_validator("classes", mode="before")
    @classmethod
    def _split_classes(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))

    @field_validator("graph_limits", mode="before")
    @classmethod
    def _split_limits(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.partition(":") for part in value.split(",") if part.strip()]
        gammas = [gamma.strip() for gamma, _, _ in pairs]
        if not all(colon for _, colon, _ in pairs) or len(set(gammas)) < len(gammas):
            raise ValueError("gamma:largest batch is needed, each gamma once, separated by commas")
        return {gamma: size.strip() for gamma, (_, _, size) in zip(gammas, pairs, strict=True)}

    @model_validator(mode="after")
    def _check_what_goes_together(self) -> Self:
        for gamma, size in self.graph_limits.items():
            if gamma not in self.gammas or size < 0:
                raise ValueError(
                    f"SPECULATION_GRAPH_LIMITS: {gamma}:{size} is no draft length of "
                    f"SPECULATION_GAMMAS {','.join(map(str, self.gammas))}, or no batch size"
                )
        if self.safe_gamma in self.graph_limits:
            raise ValueError(
                f"SPECULATION_GRAPH_LIMITS limits {self.safe_gamma}, which SPECULATION_SAFE_GAMMA "
                "needs at every batch size"
            )
        if ("prompt" in self.classes) != bool(self.class_key_file):
            raise ValueError(
                "SPECULATION_CLASSES=prompt and SPECULATION_CLASS_KEY_FILE go together: one of "
                "them is not set"
            )
        if self.online_updates:
            _ = self.online
        return self


def load_settings() -> PluginSettings:
    """Settings from the environment.  Raises PluginError."""
    return PluginSettings.load_or_refuse()
