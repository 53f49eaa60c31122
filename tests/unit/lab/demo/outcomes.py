"""Made-up plays, for tests of what is computed from them."""

from lab.demo.compare import DemoOutcome, PolicyPlays, Selection
from lab.harness.load_generator import Answer, PhasePlay, Play
from lab.harness.sidecar import GammaSample
from lab.harness.stream import StreamPhase, StreamRequest

STREAM = (
    StreamPhase(
        "1 json ×1",
        "json",
        1,
        (StreamRequest(0, "json", (1, 2), 4), StreamRequest(1, "json", (3,), 4)),
    ),
    StreamPhase(
        "2 mixed ×2",
        "mixed",
        2,
        (StreamRequest(2, "code", (4,), 4), StreamRequest(3, "csv", (5,), 4)),
    ),
)


def play_of(
    seconds: float,
    *,
    started: float = 0.0,
    accepted: int = 0,
    steps: int = 0,
    token: int = 7,
) -> Play:
    """Each phase takes `seconds`; every answer is `token` over and over."""
    phases = []
    for number, phase in enumerate(STREAM):
        answers = tuple(
            Answer(request, (token,) * request.new_tokens, steps, accepted, seconds)
            for request in phase.requests
        )
        phases.append(PhasePlay(phase, answers, started + number * seconds, seconds))
    return Play(tuple(phases))


def outcome() -> DemoOutcome:
    """Two repeats, 16 tokens a play; the second one of `static-3` has one wrong answer."""
    wrong = play_of(1.0, accepted=6, steps=4)
    phase = wrong.phases[1]
    answer = phase.answers[0]
    spoilt = Answer(answer.request, (7, 7, 9, 9), 4, 6, 1.0)
    wrong = Play(
        (
            wrong.phases[0],
            PhasePlay(phase.phase, (spoilt, phase.answers[1]), phase.started, phase.seconds),
        )
    )
    steered = (
        play_of(0.8, started=100.0, accepted=8, steps=4),
        play_of(0.5, started=200.0, accepted=8, steps=4),
    )
    return DemoOutcome(
        STREAM,
        (
            PolicyPlays("off", (play_of(1.6), play_of(1.6))),
            PolicyPlays("static-3", (play_of(1.0, accepted=6, steps=4), wrong)),
            PolicyPlays("sglang-adaptive", (play_of(2.0, steps=4), play_of(1.0, steps=4))),
            PolicyPlays("steered", steered),
        ),
        (
            (
                GammaSample(100.1, 5, 1, 7, probe=False, unsteered=False, drafter="dflash"),
                GammaSample(100.2, 9, 1, 5, probe=True, unsteered=False),
                GammaSample(101.0, 30, 2, 1, probe=False, unsteered=False),
            ),
            (GammaSample(200.1, 50, 1, 7, probe=False, unsteered=False),),
        ),
        Selection(
            {1: (play_of(1.6),), 2: (play_of(1.0), play_of(1.25)), 3: (play_of(1.0), play_of(0.8))}
        ),
    )
