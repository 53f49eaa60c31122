"""What the engine tests begin with: a scripted sidecar, and plain decoding's tokens."""

import json
import os
from collections.abc import Iterator
from itertools import chain

import pytest
from filelock import FileLock

from lab.harness.scripted_sidecar import ScriptedSidecar, scripted_sidecar
from tests.support.engine import MODES, running_engine
from tests.support.prompts_in_flight import (
    CROWD,
    CROWD_LENGTH,
    LENGTHS,
    PROMPTS,
    SINGLE_LENGTH,
    SINGLE_PROMPT,
    WAVE_LENGTH,
    WAVES,
)


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """Each way in which an engine runs its passes, one after the other."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedSidecar]:
    """One a file, for its one engine."""
    with scripted_sidecar(tmp_path_factory.mktemp("sidecar")) as scripted:
        yield scripted


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """Tokens of plain decoding, made by the first worker that needs them."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    tokens = folder / "plain.json"
    with FileLock(folder / "plain.lock"):
        if not tokens.exists():
            tokens.write_text(json.dumps(_decoded_plainly(tmp_path_factory)))
        plain_tokens: dict[str, list[list[int]]] = json.loads(tokens.read_text())
        return plain_tokens


@pytest.fixture(scope="module")
def plain_waves(plain: dict[str, list[list[int]]]) -> list[list[list[int]]]:
    """Tokens of plain decoding by wave and prompt."""
    waves = iter(plain["waves"])
    return [[next(waves) for _ in prompts] for prompts in WAVES]


def _decoded_plainly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """The plugin is installed, and off.

    All requests run at once: in float32 a token does not depend on its batch.
    """
    requests: dict[str, tuple[list[list[int]], list[int]]] = {
        "batch": (PROMPTS, LENGTHS),
        "waves": (list(chain(*WAVES)), [WAVE_LENGTH] * sum(map(len, WAVES))),
        "alone": (SINGLE_PROMPT, [SINGLE_LENGTH]),
        "crowd": (CROWD, [CROWD_LENGTH] * len(CROWD)),
    }
    prompts, lengths = (list(chain(*part)) for part in zip(*requests.values(), strict=True))
    room = ("--max-running-requests", str(len(prompts)))
    with running_engine(tmp_path_factory.mktemp("plain"), room) as engine:
        answers = iter(engine.generate(prompts, lengths))
        tokens = {
            name: [next(answers).tokens for _ in asked] for name, (asked, _) in requests.items()
        }
        assert "speculation_controller" not in engine.internal_state()
        assert "steered by" not in engine.log.read_text()
        return tokens
