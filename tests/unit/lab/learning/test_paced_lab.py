"""What a play on the paced engine comes to; no engine."""

from lab.cpu_engine.pace.step_log import LoggedStep
from lab.learning.engines import StreamPlay


def step(tokens: int, seconds: float, gamma: int = 3) -> LoggedStep:
    return LoggedStep(
        began=0.0, launched=0.0, ended=0.0, due=0.0, seconds=seconds, batch_size=4, kv_tokens=400,
        kinds={}, gamma=gamma, tokens=tokens,
    )  # fmt: skip


def test_a_play_is_halved_by_its_tokens_and_prompts_take_time_and_bring_none() -> None:
    prompts = step(60, 0.5, gamma=-1)
    steps = (prompts, step(4, 1.0), step(8, 2.0), prompts, step(8, 4.0), step(4, 8.0))
    assert StreamPlay(steps, ()).halves == ((12, 3.5), (12, 12.5))
