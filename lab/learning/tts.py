"""The claims of Test-Time Speculation (arXiv:2605.09329) that are not about strides.

The rules of the verdicts are in the docstrings; they were written before any number was seen.
"""

from collections.abc import Mapping
from typing import Any, Final

from engine_shim.sglang.training.online import OnlineSettings
from lab.harness.measured import Spread
from lab.learning.counted import (
    SHORT_TRAINED,
    STRIDE,
    Answers,
    Drafter,
    acceptance,
    drafters,
    gain,
    generate_answers,
    net_gain,
    start_learning_engine,
    update_price,
)
from lab.learning.engines import LabSetting
from lab.learning.headline import Curve, Headline, Paper, Verdict

_WINDOW: Final = "SPECULATION_ONLINE_WINDOW"
_WINDOWS: Final = (48, 256, 512, 1536)
_OPTIMISER_STEPS: Final = (1, 2, 4)
# Tokens up to which a context is short, and from which on it is long.
_SHORT: Final = 300
_LONG: Final = 800
_PARTS: Final = 4
_PROMPT: Final = 60
# Smaller differences of a gain are noise.
_NOISE: Final = 0.02
_ENGINE: Final = (
    f"The real SGLang with the target of six layers at γ = 3, one request at a time, each from the "
    f"weights as loaded, an update of every {STRIDE}th round, which lands before the next step"
)

_PRICES: Final = (
    "drafter", "optimiser steps", "tokens a verification", "gain", "price", "priced gain",
)  # fmt: skip
_PRICED: Final = (
    "The price is that of an update of one request for published drafters of 8B models on an H100, "
    "in steps of the paced model: its arithmetic is counted, and what it moves in memory is that "
    f"of the paced engine. The priced gain is what is left if every {STRIDE}th step takes so much "
    "longer."
)


def length(setting: LabSetting) -> Headline:
    """Measures the gain of updates along one long answer.

    It reproduces if, for every drafter, the median gain in the last quarter of the answer is above
    that in the first one by more than the noise and no answer loses in the last quarter; in part if
    this is so for one drafter.
    """
    tokens = 160 if setting.quick else 1200
    width = tokens // _PARTS
    bounds = [(_PROMPT + part * width, _PROMPT + (part + 1) * width) for part in range(_PARTS)]
    rows, grows, curves = [], {}, []
    facts: dict[str, Any] = {}
    compared = drafters(setting, SHORT_TRAINED)
    for drafter in compared:
        with start_learning_engine(setting, drafter, f"length-{drafter.name}", {}) as lab:
            answers_off = generate_answers(lab, drafter, tokens, setting.seeds, learn=False)
            answers_on = generate_answers(lab, drafter, tokens, setting.seeds, learn=True)
        gains = [gain(answers_on.steps, answers_off.steps, *bound) for bound in bounds]
        grows[drafter.name] = gains[-1].median > gains[0].median + _NOISE and gains[-1].low > 1
        for (first, last), part_gain in zip(bounds, gains, strict=True):
            off_spread, learning_spread = (
                _acceptance_spread(answers, first, last) for answers in (answers_off, answers_on)
            )
            row = drafter.name, f"{first - _PROMPT} to {last - _PROMPT}", off_spread.text()
            rows.append((*row, learning_spread.text(), part_gain.text()))
        ends = [float(last - _PROMPT) for _, last in bounds]
        medians = [item.median for item in gains]
        curves.append(Curve(drafter.name, tuple(zip(ends, medians, strict=True))))
        facts[drafter.name] = {
            "gain": [item.as_json() for item in gains],
            "rounds": [len(answer) for answer in answers_on.steps],
            "updates": _updates(answers_on),
            "same tokens": answers_off.tokens == answers_on.tokens,
        }
    sentences = []
    for name, is_growing in grows.items():
        first, *_, last = (item["median"] for item in facts[name]["gain"])
        grown = "grows" if is_growing else "does not grow"
        sentences.append(
            f"With {name} the gain {grown}: {first:.2f} in the first quarter, {last:.2f} in the "
            "last."
        )
    return Headline(
        Paper.TTS,
        "The gain grows with the length of the output",
        "The longer an answer, the more updates its tokens have behind them: on Qwen3-8B with "
        "DFlash the gain rises from 15-17 % in the first 10,000 tokens to 183-245 % after 20,000 "
        "(section 6.3, Figure 5), and EAGLE-3 gains as well (Table 2).",
        f"{_ENGINE}. {_names(compared)} Answers of {tokens} tokens to {setting.seeds} prompts; "
        f"windows of {OnlineSettings().window} positions.",
        ("drafter", "output tokens", "tokens a verification, off", "with updates", "gain"),
        tuple(rows),
        _verdict(list(grows.values())),
        " ".join([*sentences, _exact(facts)]),
        facts,
        tuple(curves),
        ("output tokens", "gain of tokens a verification"),
    )


def steps(setting: LabSetting) -> Headline:
    """Compares numbers of optimiser steps a round.

    The verdict is that of `judge_steps`: the claim is of what is accepted, so prices do not count.
    """
    tokens = 120 if setting.quick else 500
    counts = _OPTIMISER_STEPS[:2] if setting.quick else _OPTIMISER_STEPS
    rows = []
    gains_by_drafter, net_gains_by_drafter = (
        dict[str, dict[int, float]](),
        dict[str, dict[int, float]](),
    )
    facts: dict[str, Any] = {}
    compared = drafters(setting)
    for drafter in compared:
        variables = {count: {"SPECULATION_ONLINE_STEPS": str(count)} for count in counts}
        answers_off, answers_by_count = _answers_by_setting(
            setting, drafter, "steps", variables, tokens
        )
        gains = {
            count: gain(answers.steps, answers_off.steps)
            for count, answers in answers_by_count.items()
        }
        window = OnlineSettings().window
        prices = {count: update_price(drafter.name, window, count) for count in answers_by_count}
        nets = {
            count: net_gain(answers.steps, answers_off.steps, prices[count])
            for count, answers in answers_by_count.items()
        }
        gains_by_drafter[drafter.name] = {count: spread.median for count, spread in gains.items()}
        net_gains_by_drafter[drafter.name] = nets
        rows.append((drafter.name, "off", _acceptance_spread(answers_off).text(), "1", "0", "1"))
        for count, answers in answers_by_count.items():
            cells = _acceptance_spread(answers).text(), gains[count].text(), f"{prices[count]:.2f}"
            rows.append((drafter.name, f"K = {count}", *cells, f"{nets[count]:.2f}"))
        facts[drafter.name] = _facts(answers_off, answers_by_count, prices)
    verdict, because = judge_steps(gains_by_drafter, net_gains_by_drafter)
    return Headline(
        Paper.TTS,
        "One optimiser step a round is the best",
        "K = 1 accepts most, and further optimiser steps on the same round lower the acceptance, "
        "on AIME 2024 from 4.6 to 4.1 tokens (section 6.5, Figure 6a).",
        f"{_ENGINE}. {_names(compared)} Answers of {tokens} tokens to {setting.seeds} prompts. "
        f"{_PRICED}",
        _PRICES,
        tuple(rows),
        verdict,
        f"{because} {_exact(facts)}",
        facts,
    )


def judge_steps(
    gains_by_drafter: Mapping[str, Mapping[int, float]],
    net_gains_by_drafter: Mapping[str, Mapping[int, float]],
) -> tuple[Verdict, str]:
    """Reproduces if no K above 1 accepts more than K = 1 with any drafter; in part, with one.

    gains_by_drafter, net_gains_by_drafter: drafter -> K -> median gain, without and with the price
    of the updates. Differences up to the noise do not count.
    """
    first = {
        name: max(gains_by_count.values()) <= gains_by_count[1] + _NOISE
        for name, gains_by_count in gains_by_drafter.items()
    }
    sentences = [
        f"With {name} {'no K above 1 accepts' if is_best else 'more steps accept'} more than K = 1."
        for name, is_best in first.items()
    ]
    paid = all(
        max(gains_by_count.values()) <= gains_by_count[1] + _NOISE
        for gains_by_count in net_gains_by_drafter.values()
    )
    sentences.append(
        "With the price of the updates included, which the paper's claim is not about, K = 1 is "
        f"{'the best for' if paid else 'not the best for each of'} the drafters here."
    )
    return _verdict(list(first.values())), " ".join(sentences)


def window(setting: LabSetting) -> Headline:
    """Compares how much of a request the student attends to.

    It reproduces if, for every drafter and in short and in long contexts, the largest window
    accepts as much as any other one, up to the noise; in part if this is so in some of them.
    """
    tokens = 160 if setting.quick else 1000
    windows = _WINDOWS[:2] if setting.quick else _WINDOWS
    short, long = (140, 140) if setting.quick else (_SHORT, _LONG)
    rows, best = [], []
    curves = []
    facts: dict[str, Any] = {"priced gain": {}}
    nets: dict[int, list[float]] = {size: [] for size in windows}
    compared = drafters(setting)
    for drafter in compared:
        variables = {size: {_WINDOW: str(size)} for size in windows}
        answers_off, answers_by_size = _answers_by_setting(
            setting, drafter, "window", variables, tokens
        )
        parts = [
            {
                size: gain(entry.steps, answers_off.steps, *bound)
                for size, entry in answers_by_size.items()
            }
            for bound in ((0, short), (long, tokens + _PROMPT))
        ]
        best += [
            part[windows[-1]].median >= max(spread.median for spread in part.values()) - _NOISE
            for part in parts
        ]
        # No window holds more than the answer.
        prices = {size: update_price(drafter.name, min(size, tokens)) for size in answers_by_size}
        for size, entry in answers_by_size.items():
            nets[size].append(net_gain(entry.steps, answers_off.steps, prices[size]))
            cells = (
                *(part[size].text() for part in parts),
                gain(entry.steps, answers_off.steps).text(),
            )
            priced = f"{prices[size]:.2f}", f"{nets[size][-1]:.2f}"
            rows.append((drafter.name, str(size), *cells, *priced))
        points = tuple(
            (float(size), gain(spread.steps, answers_off.steps).median)
            for size, spread in answers_by_size.items()
        )
        curves.append(Curve(drafter.name, points))
        facts[drafter.name] = _facts(answers_off, answers_by_size, prices)
    means = {size: sum(entry) / len(entry) for size, entry in nets.items()}
    facts["priced gain"] = {str(size): round(mean, 4) for size, mean in means.items()}
    highest = max(means, key=lambda size: means[size])
    smallest_window = min(size for size, mean in means.items() if mean >= means[highest] - _NOISE)
    return Headline(
        Paper.TTS,
        "The student drafts from the whole context",
        "The loss of a round conditions on everything before the canvas (section 4.1, Algorithm "
        "1), as the drafter does that serves. A window is an approximation of this project.",
        f"{_ENGINE}. {_names(compared)} Answers of {tokens} tokens to {setting.seeds} prompts of "
        f"{_PROMPT}, which no window contains; {windows[-1]} positions are everything else. Gains "
        f"are of tokens a verification in contexts of up to {short} tokens, of {long} and more, "
        "and of the whole answer. "
        f"{_PRICED}",
        (
            "drafter", "window", f"gain to {short}", f"from {long} on", "whole answer", "price",
            "priced gain",
        ),
        tuple(rows),
        _verdict(best),
        f"The largest window accepts as much as any other in {sum(best)} of {len(best)} cells of "
        "drafter and context. "
        f"The window with the highest priced gain, mean of the drafters, has {highest} positions; "
        f"the smallest one within {_NOISE} of it has {smallest_window}. "
        f"{_exact({name: facts[name] for name in facts if name != 'priced gain'})}",
        facts,
        tuple(curves),
        ("positions of the window", "gain of tokens a verification"),
    )  # fmt: skip


def _answers_by_setting(
    setting: LabSetting,
    drafter: Drafter,
    name: str,
    variables: Mapping[int, Mapping[str, str]],
    tokens: int,
) -> tuple[Answers, dict[int, Answers]]:
    """Generates the same answers without updates and with each of these settings."""
    answers_off: Answers | None = None
    answers_by_value: dict[int, Answers] = {}
    for value, engine_variables in variables.items():
        with start_learning_engine(
            setting, drafter, f"{name}-{drafter.name}-{value}", engine_variables
        ) as lab:
            answers_off = answers_off or generate_answers(
                lab, drafter, tokens, setting.seeds, learn=False
            )
            answers_by_value[value] = generate_answers(
                lab, drafter, tokens, setting.seeds, learn=True
            )
    assert answers_off is not None
    return answers_off, answers_by_value


def _facts(
    answers_off: Answers, answers_by_value: Mapping[int, Answers], prices: Mapping[int, float]
) -> dict[str, Any]:
    return {
        "off": _acceptance_spread(answers_off).as_json(),
        "same tokens": all(
            answers.tokens == answers_off.tokens for answers in answers_by_value.values()
        ),
        "by": {
            str(value): {
                "tokens a verification": _acceptance_spread(answers).as_json(),
                "gain": gain(answers.steps, answers_off.steps).as_json(),
                "price": round(prices[value], 4),
                "updates": _updates(answers),
                "gain by update": _gain_by_update(answers, answers_off),
            }
            for value, answers in answers_by_value.items()
        },
    }


def _updates(answers: Answers) -> list[int]:
    """Counts the updates that landed, by answer."""
    return [sum(step.update > 0 for step in answer) for answer in answers.steps]


def _gain_by_update(answers: Answers, answers_off: Answers) -> list[list[float]]:
    """Lists updates made and the mean gain of the next 20, over the mean without any."""
    baseline_acceptance = sum(acceptance(entry) for entry in answers_off.steps) / len(
        answers_off.steps
    )
    gains_by_update: dict[int, list[int]] = {}
    for answer in answers.steps:
        update_count = 0
        for step in answer:
            update_count += step.update > 0
            gains_by_update.setdefault(update_count // 20 * 20, []).append(step.gained_tokens)
    return [
        [update_count, round(sum(entry) / len(entry) / baseline_acceptance, 3)]
        for update_count, entry in sorted(gains_by_update.items())
    ]


def _acceptance_spread(answers: Answers, first: int = 0, last: int = 1 << 20) -> Spread:
    return Spread(tuple(acceptance(answer, first, last) for answer in answers.steps))


def _names(compared: tuple[Drafter, ...]) -> str:
    return " ".join(
        f"{drafter.name}: `{drafter.folder.parent.name}/{drafter.folder.name}` on {drafter.domain}."
        for drafter in compared
    )


def _exact(facts: Mapping[str, Any]) -> str:
    exact = all(drafter_facts["same tokens"] for drafter_facts in facts.values())
    return f"Tokens with and without updates are {'the same' if exact else 'NOT the same'}."


def _verdict(holds: list[bool]) -> Verdict:
    return Verdict.from_parts(full=all(holds), part=any(holds))
