"""What the engine tests begin with: a scripted sidecar, and plain decoding's tokens."""

from collections.abc import Iterator

import pytest

from tests.support.engine import serving
from tests.support.prompts_in_flight import (
    ALONE,
    ALONE_LENGTH,
    CROWD,
    CROWD_LENGTH,
    LENGTHS,
    PROMPTS,
    WAVE_LENGTH,
    WAVES,
)
from tests.support.scripted_sidecar import ScriptedSidecar, scripted_sidecar


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedSidecar]:
    """One a file, for its one engine."""
    with scripted_sidecar(tmp_path_factory.mktemp("sidecar")) as scripted:
        yield scripted


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """Tokens of plain decoding.  The plugin is installed, and off."""
    with serving(tmp_path_factory.mktemp("plain")) as engine:
        tokens = {
            "batch": [answer.tokens for answer in engine.generate(PROMPTS, LENGTHS)],
            "waves": [
                answer.tokens
                for prompts in WAVES
                for answer in engine.generate(prompts, [WAVE_LENGTH] * len(prompts))
            ],
            "alone": [answer.tokens for answer in engine.generate(ALONE, [ALONE_LENGTH])],
            "crowd": [
                answer.tokens for answer in engine.generate(CROWD, [CROWD_LENGTH] * len(CROWD))
            ],
        }
        assert "speculation_controller" not in engine.internal_state()
        assert "steered by" not in engine.log.read_text()
        return tokens
