"""Made-up plays, for tests of what is computed from them."""

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import load_step_costs
from lab.cpu_engine.pace.step_log import LoggedRequest, LoggedStep, LogPart
from lab.demo.exact import ExactPlay, Mismatch
from lab.demo.outcome import DemoOutcome
from lab.harness.load_generator import Answer, PhasePlay, Play, StreamPhase
from lab.paced.lost_time import LostTime, Oracle, PolicyRate
from lab.paced.plays import StreamPlay
from lab.paced.traffic import Stream, make_request

DILATION = 2.0
STREAM = Stream(
    "made-up",
    7,
    (
        StreamPhase("quiet", 1, (make_request("code", 0, 9, (20, 21, 22, 23)),)),
        StreamPhase(
            "busy",
            2,
            (
                make_request("chat", 1, 9, (24, 25, 26, 27)),
                make_request("chat", 2, 9, (28, 29, 30, 31)),
            ),
        ),
    ),
)


def step(began: float, seconds: float, size: int, gamma: int, **more: object) -> LoggedStep:
    """A decode step on time; `seconds` of the model."""
    ended = began + seconds * DILATION
    fields = {
        "began": began, "launched": began, "ended": ended, "due": ended, "seconds": seconds,
        "batch_size": size, "kv_tokens": 10 * size, "kinds": {"chat": size}, "drafter": "eagle3",
        "gamma": gamma, "tokens": size * (1 + gamma), "accepted": size * gamma, "steered": True,
    } | more  # fmt: skip
    return LoggedStep(**fields)  # type: ignore[arg-type]


def play_of(
    policy: str, seconds: float, gamma: int, *, began: float = 100.0, late: int = 0
) -> StreamPlay:
    """A play in which each phase lasts `seconds` of the model and has eight steps."""
    long = seconds * DILATION
    steps = []
    requests = []
    for phase, size in enumerate((1, 2)):
        start = began + phase * long
        each = seconds / 8
        steps += [
            step(
                start + i * each * DILATION, each, size, gamma, tokens=size, accepted=0,
                late=phase == 0 and i < late, probe=int(i == 0), shim_seconds=1e-4,
            )
            for i in range(8)
        ]  # fmt: skip
        requests += [
            LoggedRequest(r.rid, start, start + long, r.new_tokens)
            for r in STREAM.phases[phase].requests
        ]
    played = Play(
        tuple(
            PhasePlay(
                phase,
                tuple(Answer(request, (7,) * 9, 0, 0, long) for request in phase.requests),
                began + number * long,
                long,
            )
            for number, phase in enumerate(STREAM.phases)
        )
    )
    return StreamPlay(policy, STREAM, DILATION, played, LogPart(tuple(steps), tuple(requests), 0))


def outcome() -> DemoOutcome:
    """Two repeats of 27 tokens in 54, 27, 27 and 18 model seconds; one wrong token of static-4."""
    rates = PolicyRate(1.5, (1.0, 2.0))
    statics = {Arm("eagle3", 0): PolicyRate(0.5, (0.3, 0.6)), Arm("eagle3", 4): rates}
    oracle = Oracle(statics, (Arm("eagle3", 4), Arm("eagle3", 0)), PolicyRate(2.0, (1.0, 2.0)))
    wrong = ExactPlay("static-4", 40, 2.0, (Mismatch(3, 2, 7, 9),))
    return DemoOutcome(
        STREAM,
        load_step_costs("h100-llama3.1-8b", (0, 4)),
        DILATION,
        (oracle, oracle),
        {
            "off": (play_of("off", 27.0, 0), play_of("off", 27.0, 0)),
            "static-4": (play_of("static-4", 13.5, 4), play_of("static-4", 13.5, 4)),
            "sglang-adaptive": (
                play_of("sglang-adaptive", 13.5, 3),
                play_of("sglang-adaptive", 18.0, 3),
            ),
            "steered": (play_of("steered", 9.0, 4), play_of("steered", 9.0, 7)),
        },
        (LostTime(0.01, 0.02, 0.003, 0.004, 0.005, 0.006), LostTime()),
        (
            ExactPlay("off", 40, 1.0, ()),
            wrong,
            ExactPlay("steered", 40, 2.5, (), ("0", "dflash 3", "eagle3 1")),
        ),
        {"cells": [
            {"drafter": "eagle3", "gamma": gamma, "batch_size": size,
             "step_seconds": 0.002 * (gamma + size)}
            for gamma in (0, 3) for size in (1, 16)
        ]},
    )  # fmt: skip
