"""Online updates of an EAGLE3 drafter (test-time speculation) inside a serving engine.

    after_verify    keeps what the round has verified; every `stride` rounds hands it to the trainer
    before_step     between two steps: copies new weights into the serving drafter, or the last good
                    ones back when acceptance fell

The trainer is a process of its own (engine_shim.training.trainer); nothing here waits for it.  The
target is never touched, its embedding, which the drafter shares, included: whatever the drafter
becomes, tokens stay the target's.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, Final

import torch

from engine_shim.sglang.windows import Windows
from engine_shim.training import exchange, trainer
from engine_shim.training.checkpoint import eagle3_shape
from engine_shim.training.exchange import Channel, Kind, Layout, Message, SharedTensors

if TYPE_CHECKING:
    from engine_shim.sglang.settings import PluginSettings
    from engine_shim.training.online import OnlineSettings

# Requests of a batch that a round is learnt from, at most.
MOST_REQUESTS: Final = 16
# The target's, of which the live drafter has a reference: never trained, never copied.
_EMBEDDING: Final = "model.embed_tokens.weight"
# First positions drafted between two judgements of the weights.
_JUDGED: Final = 400
# Before the first update, so that there is something to compare with.
_LEAST_JUDGED: Final = 50
_MOST_DOUBLINGS: Final = 6
# Standard errors that acceptance may have fallen by.
_LIMIT: Final = 3.0
# The same after every step in between: many looks, so it takes more.
_EARLY_LIMIT: Final = 5.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class OnlineCounters:
    """Since the engine started.

    rounds: handed to the trainer; updates: weights that were copied in; refused: rounds without a
    usable result; restored: returns to the last good weights; resets: returns to the first ones.
    loss (nats), seconds: of the last update.  state: what it does, or why it does nothing.
    """

    rounds: int = 0
    updates: int = 0
    refused: int = 0
    restored: int = 0
    resets: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    state: str = "starting"


def cannot_update_reason(worker: Any, device: str, ranks: int) -> str | None:
    """Why the drafter of this `EAGLEWorkerV2` cannot learn while it serves; None when it can."""
    model = worker.draft_worker.draft_runner.model
    if type(model).__name__ != "LlamaForCausalLMEagle3":
        return f"{type(model).__name__} has no student: EAGLE3 drafters only"
    config = model.config
    obstacles = {
        f"on {device} it is untested: the CPU only": device != "cpu",
        f"{ranks} ranks share the drafter's weights: one is needed": ranks > 1,
        "its vocabulary is smaller than the target's": model.hot_token_id is not None
        and not _is_identity(model.hot_token_id),
        "its rotary positions are scaled": bool(getattr(config, "rope_scaling", None))
        and "factor" in config.rope_scaling,
        f"it has {config.num_hidden_layers} layers: one is needed": config.num_hidden_layers != 1,
    }
    return next((reason for reason, is_so in obstacles.items() if is_so), None)


class OnlineUpdates:
    """One engine's.  worker: its `EAGLEWorkerV2`, for which `cannot_update_reason` is None."""

    def __init__(self, worker: Any, settings: PluginSettings, largest_gamma: int) -> None:
        """Raises UnsupportedEngineError where the student is not the drafter."""
        self.counters = OnlineCounters()
        self._per_request = settings.online_scope == "request"
        self._online: OnlineSettings = settings.online
        model = worker.draft_worker.draft_runner.model
        parameters = dict(model.named_parameters())
        embedding = parameters.pop(_EMBEDDING)
        self._live = parameters
        shape = eagle3_shape(model.config.to_dict(), model.model.num_aux_hidden_states)
        layouts = self._layouts(embedding, model.model.num_aux_hidden_states, largest_gamma)
        self._memory = SharedTensors(layouts)
        self._memory.tensors["embedding"].copy_(embedding.detach())
        self._first = {name: live.detach().clone() for name, live in parameters.items()}
        self._good = dict(self._first)
        self._windows = Windows(self._online.window, self._online.top)
        self._accepted = Acceptance()
        self._judged = Acceptance()
        # First positions to be drafted before anything is learnt: what to compare with.
        self._hold = _LEAST_JUDGED
        self._setbacks = 0
        self._stale = False
        self._since = 0
        self._requests: list[str] = []
        # Their drafter's cache was filled by weights that are not served any more.
        self._tainted: set[str] = set()
        self._share(self._first)
        self._start(trainer.order(shape, self._online, layouts, threads=1))

    def before_prefill(self, request_ids: list[str]) -> None:
        """As a prefill begins, before the drafter reads it."""
        if self._per_request and self._channel is not None and request_ids != self._requests:
            self._requests = request_ids
            if self._changed:
                self._put_back(self._first, [])
                self.counters.resets += 1

    def before_step(self) -> None:
        """As a decode step begins, before anything drafts."""
        if self._channel is None:
            return
        try:
            message = self._channel.receive(wait=False)
        except EOFError:
            self._end(f"the trainer has ended with status {self._process.poll()}")
            return
        if message is not None:
            self._take(message)

    def after_verify(self, batch: Any, result: Any, stride: int) -> None:
        """Before a step's draft-extend.  stride: rounds between two updates, 0 for none."""
        if self._channel is None:
            return
        gamma: int = result.logits_output.hidden_states.shape[0] // len(batch.reqs) - 1
        accepted = result.accept_lens.tolist()
        if gamma:
            rows = zip(batch.reqs, accepted, strict=True)
            counted = [length > 1 for request, length in rows if request.rid not in self._tainted]
            self._accepted.add(sum(counted), len(counted))
            self._judge([request.rid for request in batch.reqs])
        if not stride:
            self._windows.clear()
            return
        ready = self._windows.add(batch, result, accepted)
        self._since += 1
        if gamma and ready and self._since >= stride and self._may_learn(batch):
            self._hand_over(gamma)

    def close(self) -> None:
        """Ends the trainer."""
        if self._channel is not None:
            self._end("closed")

    def _may_learn(self, batch: Any) -> bool:
        alone = len(batch.reqs) == 1
        return self._idle and not self._hold and (alone or not self._per_request)

    def _hand_over(self, gamma: int) -> None:
        tensors = self._memory.tensors
        requests, positions = self._windows.write(tensors, MOST_REQUESTS, gamma)
        if not requests:
            return
        assert self._channel is not None
        self._since = 0
        self._idle = not self._channel.send(
            Message(Kind.LEARN, requests=requests, positions=positions, gamma=gamma)
        )
        self.counters.rounds += 1

    def _take(self, message: Message) -> None:
        if message.kind is Kind.READY:
            self.counters.state = "ready"
            self._idle = True
            return
        self._idle = True
        if self._stale:
            # Learnt by weights that are not served any more.
            self._stale = False
            self._tell_weights()
            return
        if message.kind is Kind.REFUSED:
            self.counters.refused += 1
            _log.warning("an update of the drafter came to nothing: %s", message.text)
            return
        with torch.no_grad():
            for name, live in self._live.items():
                live.data.copy_(self._memory.tensors[trainer.WEIGHT + name])
        self._changed = self._unjudged = True
        self.counters.updates += 1
        self.counters.loss, self.counters.seconds = message.loss, message.seconds

    def _judge(self, request_ids: list[str]) -> None:
        """Every few hundred drafts: are these weights worse than the last good ones were?

        request_ids: that run now.
        """
        found = self._accepted
        if self._hold:
            if found.trials >= self._hold:
                self._judged, self._hold, self._accepted = found, 0, Acceptance()
            return
        fell = self._unjudged and found.fell_from(self._judged) > (
            _LIMIT if found.trials >= _JUDGED else _EARLY_LIMIT
        )
        if found.trials < (_LEAST_JUDGED if fell else _JUDGED):
            return
        self._accepted = Acceptance()
        if not self._unjudged:
            self._judged = found
        elif fell:
            self._setbacks += 1
            self.counters.restored += 1
            # What traffic makes of the good weights now is measured first, the longer the more
            # often nothing good came of learning.
            self._hold = _JUDGED * 2 ** min(self._setbacks - 1, _MOST_DOUBLINGS)
            _log.warning(
                "acceptance fell from %.3f to %.3f after updates of the drafter: the last good "
                "weights are back, and it learns no more for %d drafts",
                self._judged.rate, found.rate, self._hold,
            )  # fmt: skip
            self._put_back(self._good, request_ids)
        else:
            self._judged, self._setbacks, self._unjudged = found, 0, False
            self._good = {name: live.detach().clone() for name, live in self._live.items()}

    def _put_back(self, weights: dict[str, torch.Tensor], running: list[str]) -> None:
        with torch.no_grad():
            for name, live in self._live.items():
                live.data.copy_(weights[name])
        self._changed = weights is not self._first
        self._unjudged = False
        self._good = dict(weights)
        self._accepted = Acceptance()
        self._tainted = set(running)
        self._replace = weights
        if self._idle:
            self._tell_weights()
        else:
            self._stale = True

    def _tell_weights(self) -> None:
        assert self._channel is not None
        self._share(self._replace)
        self._channel.send(Message(Kind.TAKE_WEIGHTS))

    def _share(self, weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            self._memory.tensors[trainer.WEIGHT + name].copy_(tensor)

    def _layouts(self, embedding: Any, groups: int, largest_gamma: int) -> dict[str, Layout]:
        size = MOST_REQUESTS, self._online.window + largest_gamma + 1
        top = min(self._online.top, embedding.shape[0])
        return {
            "tokens": Layout(size, "int64"),
            "features": Layout((*size, groups * embedding.shape[1]), "float32"),
            "top_tokens": Layout((*size, top), "int64"),
            "top_logs": Layout((*size, top), "float32"),
            "taught": Layout(size, "bool"),
            "valid": Layout(size, "bool"),
            "positions": Layout(size, "int64"),
            "embedding": Layout(tuple(embedding.shape), "float32"),
            **{
                trainer.WEIGHT + name: Layout(tuple(live.shape), "float32")
                for name, live in self._live.items()
            },
        }

    def _start(self, order: str) -> None:
        ours, theirs = Channel.pair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", trainer.__name__,
                    str(self._memory.fd), str(theirs.fileno()), order,
                ],
                pass_fds=(self._memory.fd, theirs.fileno()),
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._channel: Channel | None = exchange.Channel(ours)
        self._idle = False
        self._changed = self._unjudged = False

    def _end(self, why: str) -> None:
        self.counters.state = why
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._process.kill()
        self._process.wait()
        self._windows.clear()
        _log.warning("the drafter is updated no more: %s", why)


class Acceptance:
    """Of first draft positions."""

    def __init__(self) -> None:
        self.successes = self.trials = 0

    def add(self, successes: int, trials: int) -> None:
        """Of one step."""
        self.successes += successes
        self.trials += trials

    @property
    def rate(self) -> float:
        """Share of them that were accepted."""
        return self.successes / self.trials

    def fell_from(self, before: Acceptance) -> float:
        """By how many standard errors the rate has fallen; 0 without any trial."""
        if not self.trials or not before.trials:
            return 0.0
        both = (self.successes + before.successes) / (self.trials + before.trials)
        variance = both * (1 - both) * (1 / self.trials + 1 / before.trials)
        return (before.rate - self.rate) / sqrt(variance) if variance else 0.0


def _is_identity(tokens: torch.Tensor) -> bool:
    return bool((tokens.cpu() == torch.arange(tokens.shape[0])).all())
