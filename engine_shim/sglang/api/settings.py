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
    engine. In a mixture each row of a step gets the proposal with the higher expected acceptance.
    A request is compared with its own tokens only."""
    classes: Annotated[
        tuple[Literal["grammar", "temperature", "prompt", "adapter", "label"], ...], NoDecode
    ] = ()
    """Traits that divide requests into classes, so that the sidecar estimates the acceptance of
    each class: grammar (JSON schema, tool call, other grammars), temperature (greedy, below 0.7,
    above), prompt (a keyed hash of the first tokens), adapter (name of the LoRA adapter), label
    (what the client sends as speculation_class), separated by commas."""
    class_key_file: str = ""
    """File with the key of that hash, 16 bytes or more. With the key and a label, a prompt can be
    found by trying candidates."""
    class_prompt_tokens: int = Field(default=64, ge=8, le=4096)
    """Number of first tokens of a prompt that the hash covers. Shorter prompts have no such
    class."""
    graph_limits: Annotated[dict[int, int], NoDecode] = Field(default={})
    """Draft lengths that get graphs for small batches only, as gamma:largest batch, separated by
    commas. This saves memory and shortens the start. The sidecar does not plan them for larger
    batches. `controller profile show` prints the limits that a profile recommends."""
    sleep_positions: int = Field(default=32, ge=0, le=4096)
    """Steps that a sleeping drafter may miss before it catches up in one pass. 0: the drafter never
    sleeps."""

    online_updates: bool = False
    """Start a trainer that updates the drafter while it serves, when the plan asks for it."""
    online_scope: Literal["shared", "request"] = "shared"
    """`shared`: all requests train the drafter. `request`: each request begins with the
    drafter as loaded, and the drafter learns only while a single request runs."""
    online_learning_rate: float = 1e-3
    """Learning rate of AdamW in online updates."""
    online_proximal: float = 0.0
    """Weight of the proximal term, which keeps the drafter near its state at the start of the
    round. It takes effect from the second optimiser step of a round on."""
    online_discount: float | None = None
    """Weight of a draft position in the loss, relative to the previous position. Unset: the value
    of the drafter's own training, 0.8 for EAGLE3 and MTP, exp(-2 / block) for DFlash."""
    online_steps: int = 1
    """Optimiser steps in each round of online updates."""
    online_anchors: int = 16
    """Number of newest positions of each request from which a round drafts."""
    online_window: int = 256
    """Number of newest positions of each request to which a round's drafts attend. They are kept
    for at most 16 requests."""
    online_megabytes: int = Field(default=1024, ge=1)
    """Limit of the host's memory for these positions, in megabytes. A window that needs more is
    refused at the start."""

    online_device: str = Field(default="", pattern=r"^(|cpu|cuda(:\d+)?)$")
    """Device of the trainer of online updates, as torch names it. Empty: the engine's device, which
    then needs free memory for at least 16 bytes a parameter."""

    learner: str = ""
    """Name of the drafter that learns, by online updates or from a trainer: `dflash` for a second
    drafter beside the engine's own. Empty: the engine's own."""
    signals_folder: str = ""
    """Folder to which training signals are written when the plan asks for it (`controller override
    set --regime collect`). Empty: no signals are written."""
    signals_megabytes: int = Field(default=1024, ge=1)
    """Limit of the folder's size in megabytes. Beyond it the oldest signals are deleted."""
    signals_device_megabytes: int = Field(default=256, ge=1)
    """Limit of the device's memory, in megabytes, for rounds that have not been read yet. Rounds
    beyond the limit are dropped and counted."""
    signals_top: int = Field(default=64, ge=1, le=1024)
    """Number of the target's likeliest tokens that are kept for each position."""
    signals_final_states: bool = False
    """Also keep the target's last hidden states, which SpecForge's offline trainer of EAGLE3
    drafters needs."""

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
    def _check_combinations(self) -> Self:
        for gamma, size in self.graph_limits.items():
            if gamma not in self.gammas or size < 0:
                raise ValueError(
                    f"SPECULATION_GRAPH_LIMITS: {gamma}:{size} is not a draft length of "
                    f"SPECULATION_GAMMAS {','.join(map(str, self.gammas))}, or not a batch size"
                )
        if self.safe_gamma in self.graph_limits:
            raise ValueError(
                f"SPECULATION_GRAPH_LIMITS limits {self.safe_gamma}, which SPECULATION_SAFE_GAMMA "
                "needs at every batch size"
            )
        if ("prompt" in self.classes) != bool(self.class_key_file):
            raise ValueError(
                "SPECULATION_CLASSES=prompt and SPECULATION_CLASS_KEY_FILE must be set together: "
                "one of them is not set"
            )
        if self.online_updates:
            _ = self.online
        return self


def load_settings() -> PluginSettings:
    """Reads the settings from the environment.  Raises PluginError."""
    return PluginSettings.load_or_raise()
