"""What several tests here need, made once."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from lab.cpu_engine.models import corpus


@pytest.fixture(scope="session")
def texts() -> dict[str, list[str]]:
    return corpus.documents()


@pytest.fixture(scope="session")
def tokenizer(texts: dict[str, list[str]]) -> Tokenizer:
    return corpus.train_tokenizer(texts)
