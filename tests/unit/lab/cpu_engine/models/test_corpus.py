"""The corpus: deterministic, held apart, and reversible through the tokenizer."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from lab.cpu_engine.models import corpus
from lab.cpu_engine.models.prompts import DOMAINS


def test_the_vocabulary_is_exactly_the_models(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == corpus.VOCABULARY_SIZE
    assert tokenizer.token_to_id(corpus.DOCUMENT_TOKEN) == corpus.DOCUMENT_TOKEN_ID


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_document_is_both_trained_on_and_held_out(
    texts: dict[str, list[str]], tokenizer: Tokenizer, domain: str
) -> None:
    few = {name: documents[:50] for name, documents in texts.items()}
    split = corpus.tokenize(few, tokenizer)[domain]
    train, held_out = (
        tokenizer.encode_batch(few[domain][:46]),
        tokenizer.encode_batch(few[domain][46:]),
    )
    for stream, encodings in ((split.train, train), (split.validation, held_out)):
        expected = [token for encoding in encodings for token in (0, *encoding.ids)]
        assert stream.tolist() == expected
