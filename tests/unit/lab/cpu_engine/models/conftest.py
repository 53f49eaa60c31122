"""What several tests here need and nobody wants to make twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer

from lab.cpu_engine.models import corpus


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for each other on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def texts() -> dict[str, list[str]]:
    return corpus.documents()


@pytest.fixture(scope="session")
def tokenizer(texts: dict[str, list[str]]) -> Tokenizer:
    return corpus.train_tokenizer(texts)
