"""The real server on a model made here: the same tokens as Transformers, alone and together."""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lab.cpu_engine.environment import PACE_VARIABLE
from lab.cpu_engine.pace.pacer import Pace
from lab.cpu_engine.serve import apply_pace_options, with_cpu_defaults
from tests.support.engine import EngineProcess, running_engine

VOCABULARY = 96
NEW_TOKENS = 40
GAMMA = 4
LENGTHS = (1, 3, 17, 33, 90, 160, 205, 350)
SPECULATION = (
    *("--speculative-algorithm", "STANDALONE"),
    *("--speculative-num-steps", str(GAMMA)),
    *("--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", str(GAMMA + 1)),
)


def test_defaults_stand_before_the_arguments_and_yield_to_them() -> None:
    arguments = with_cpu_defaults(
        ["--model-path", "somewhere", "--dtype=bfloat16", "--device", "x"]
    )
    assert arguments[-4:] == ["somewhere", "--dtype=bfloat16", "--device", "x"]
    assert "float32" not in arguments
    assert arguments.count("--device") == 1
    assert {"--disable-cuda-graph", "--sleep-on-idle"} <= set(arguments)


def test_a_pace_is_taken_out_of_the_arguments_and_goes_without_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PACE_VARIABLE, "")
    assert apply_pace_options(["--device", "x"]) == ["--device", "x"]
    assert "--disable-overlap-schedule" not in with_cpu_defaults([])
    pace = ["--pace", "h100-llama3.1-8b", "--dilation", "2.5", "--pace-log", "steps.jsonl"]
    assert apply_pace_options([*pace, "--device", "x"]) == ["--device", "x"]
    assert Pace.from_json(os.environ[PACE_VARIABLE]) == Pace("h100-llama3.1-8b", 2.5, "steps.jsonl")
    assert "--disable-overlap-schedule" in with_cpu_defaults([])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--pace", "h200"), "--pace: h200: is neither a file nor one of: tide-gpt-oss-120b, "),
        (("--pace", "h100-llama3.1-8b", "--dilation", "nan"), "a dilation is a number above 0"),
        (("--dilation", "2"), "--dilation and --pace-log need --pace"),
        (("--pace-log", "steps.jsonl"), "--dilation and --pace-log need --pace"),
    ],
)
def test_a_pace_that_cannot_be_ends_the_command_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], complaint: str
) -> None:
    monkeypatch.setenv(PACE_VARIABLE, "")
    with pytest.raises(SystemExit, match=complaint) as ended:
        apply_pace_options(arguments)
    assert "\n" not in str(ended.value)
    assert not os.environ[PACE_VARIABLE]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 whose layers matter, with a tokenizer."""
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(6)
    return [
        torch.randint(4, VOCABULARY, (length,), generator=random).tolist() for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Started as a user starts it."""
    arguments = ("--model-path", str(model), "--disable-radix-cache")
    with running_engine(tmp_path_factory.mktemp("plain"), arguments, fresh=True) as engine:
        yield engine


def tokens(engine: EngineProcess, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    answers = engine.generate(prompts, [NEW_TOKENS] * len(prompts))
    return [answer.tokens for answer in answers]


@pytest.mark.engine
@pytest.mark.slow
class TestPlain:
    def test_greedy_tokens_are_those_of_transformers(
        self, plain: EngineProcess, model: Path, prompts: list[list[int]]
    ) -> None:
        reference = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
        for prompt, answer in zip(prompts, tokens(plain, prompts), strict=True):
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            best = logits.topk(2).values
            # Where two tokens tie within float32 rounding, either is right.
            clear = best[:, 0] - best[:, 1] > 1e-4
            assert clear.sum() >= NEW_TOKENS - 2
            assert torch.equal(logits.argmax(-1)[clear], torch.tensor(answer)[clear])

    def test_tokens_do_not_depend_on_the_company(
        self, plain: EngineProcess, prompts: list[list[int]]
    ) -> None:
        together = tokens(plain, prompts)
        assert [tokens(plain, [prompt])[0] for prompt in prompts] == together
        assert [t for pair in pairwise(prompts) for t in tokens(plain, pair)] == [
            t for pair in pairwise(together) for t in pair
        ]


@pytest.mark.engine
@pytest.mark.slow
def test_speculation_gives_the_very_same_tokens(
    plain: EngineProcess, model: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """The model drafts for itself: it is right often, and not always.

    SGLang's STANDALONE drafter never sees the first token of a prompt.
    """
    arguments = ("--model-path", str(model), "--disable-radix-cache", *SPECULATION)
    draft = ("--speculative-draft-model-path", str(model))
    expected = tokens(plain, prompts)
    with running_engine(tmp_path, [*arguments, *draft]) as engine:
        for chosen in ([0], [1, 2, 3, 4], range(len(prompts))):
            answers = engine.generate([prompts[i] for i in chosen], [NEW_TOKENS] * len(chosen))
            assert [answer.tokens for answer in answers] == [expected[i] for i in chosen]
            rounds = sum(answer.meta["spec_verify_ct"] for answer in answers)
            assert len(chosen) * (NEW_TOKENS - 1) / (GAMMA + 1) < rounds
            assert rounds < 0.8 * len(chosen) * (NEW_TOKENS - 1)


@pytest.mark.engine
@pytest.mark.slow
def test_bfloat16_serves_and_repeats_itself(
    model: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    arguments = ("--model-path", str(model), "--dtype", "bfloat16", "--disable-radix-cache")
    with running_engine(tmp_path, arguments) as engine:
        first = tokens(engine, prompts)
        assert tokens(engine, prompts) == first
        assert all(len(answer) == NEW_TOKENS for answer in first)
