"""The corpus: deterministic, held apart, and reversible through the tokenizer."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer

from lab.cpu_engine.models import corpus
from lab.cpu_engine.models.prompts import DOMAINS, LONGEST_PROMPT, PASSAGES


def test_the_same_seed_gives_the_same_documents(texts: dict[str, list[str]]) -> None:
    assert corpus.documents() == texts
    assert list(corpus._json_documents(random.Random(1), 3)) != texts["json"][:3]


def test_the_same_documents_give_the_same_tokenizer(
    texts: dict[str, list[str]], tokenizer: Tokenizer
) -> None:
    assert corpus.train_tokenizer(texts).to_str() == tokenizer.to_str()


def test_the_vocabulary_is_exactly_the_models(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == corpus.VOCABULARY_SIZE
    assert tokenizer.token_to_id(corpus.DOCUMENT_TOKEN) == corpus.DOCUMENT_TOKEN_ID


def test_code_carries_no_docstrings(texts: dict[str, list[str]]) -> None:
    sentence = "A sentence that is long enough to be worth learning from, surely."
    source = f'def f():\n    """{sentence}"""\n    return 1\n'
    assert corpus._split_docstrings(source) == ("def f():\n    return 1\n", [sentence])
    assert len(texts["code"]) > 100


def test_json_documents_are_json(texts: dict[str, list[str]]) -> None:
    decoder = json.JSONDecoder()
    for text in texts["json"][:20]:
        position, ids = 0, []
        while position < len(text):
            record, position = decoder.raw_decode(text, position)
            position += 1
            ids.append(record["id"])
        assert ids == list(range(ids[0], ids[0] + 8))


def test_csv_documents_are_tables_that_add_up(texts: dict[str, list[str]]) -> None:
    for text in texts["csv"][:20]:
        rows = list(csv.DictReader(io.StringIO(text)))
        assert len(rows) >= 15
        for before, after in itertools.pairwise(rows):
            assert int(after["index"]) == int(before["index"]) + 1
            assert 100 <= int(after["value"]) <= 999


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


def test_passages_span_the_held_out_stream() -> None:
    stream = np.arange(40_000, dtype=np.uint16)
    passages = corpus.passages(stream)
    assert passages.shape == (PASSAGES, LONGEST_PROMPT)
    assert passages.dtype == np.uint16
    assert passages[0, 0] == 0
    assert passages[-1, -1] == 39_999
