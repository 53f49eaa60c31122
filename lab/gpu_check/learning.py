"""Has a small trained drafter learn online while it serves, and compares its tokens.

The drafter has only seen code, and serves CSV, so that there is something to learn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lab.cpu_engine.models.prompts import held_out_prompts
from lab.gpu_check import exact
from lab.gpu_check.exact import Difference
from lab.harness.stream import StreamPhase, StreamRequest

LEARNING = "learning"
DRAFT = "draft-code"
GAMMA = 3
# What is asked of the sidecar: that draft length, and an update every few steps.
RULE = ("--gamma", str(GAMMA), "--regime", "online:2")

_DOMAIN = "csv"
_PROMPT_TOKENS = 60
_BATCH = 4
# Of the trainer, so that a short play shows something.
_VARIABLES = {"SPECULATION_ONLINE_UPDATES": "1", "SPECULATION_GAMMAS": f"0,1,{GAMMA}"}


def environment(address: str) -> dict[str, str]:
    """Makes the variables of the engine; address: the sidecar's."""
    named = {"SPECULATION_SIDECAR": address, "SPECULATION_ENGINE_ID": LEARNING}
    return exact.NO_TF32 | named | _VARIABLES


def build_stream(requests: int, new_tokens: int) -> tuple[StreamPhase, ...]:
    """Builds requests for CSV, a few at a time."""
    prompts = held_out_prompts(_DOMAIN, requests, _PROMPT_TOKENS, 1)
    asked = [
        StreamRequest(index, _DOMAIN, tuple(prompt), new_tokens)
        for index, prompt in enumerate(prompts)
    ]
    return (StreamPhase(LEARNING, "held out", _BATCH, tuple(asked)),)


def document(
    differences: Sequence[Difference],
    lengths: Sequence[float],
    status: dict[str, Any],
    syncs: dict[str, Any] | None,
) -> dict[str, Any]:
    """Makes the document of the part.

    lengths: acceptance length of each play.  status: what the plugin says.  syncs: of the engine.
    """
    return {
        "wrong": sum(one.verdict == exact.WRONG for one in differences),
        "differences": [asdict(one) | {"sentence": one.sentence()} for one in differences],
        "acceptance_lengths": [round(length, 3) for length in lengths],
        "online": status["online"],
        "lost": status["lost"],
        "syncs": syncs,
    }


def problems(found: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong, in sentences."""
    wrong = [
        f"while learning, {one['sentence']}"
        for one in found["differences"]
        if one["verdict"] == exact.WRONG
    ]
    online = found["online"]
    if not online or not online["updates"]:
        state = online["state"] if online else "there was no trainer"
        wrong.append(f"no online update landed: {state}")
    return wrong + [f"{loss['capability']} was lost: {loss['reason']}" for loss in found["lost"]]
