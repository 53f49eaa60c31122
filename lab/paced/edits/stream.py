"""Makes streams of requests from held-out edits of CPython's sources."""

import numpy as np

from lab.cpu_engine.models.edits import EncodedEdit
from lab.cpu_engine.pace.acceptance import RequestId
from lab.paced.day import Phase, PhasePlan, Request, Stream


def build_stream(
    name: str, edits: tuple[EncodedEdit, ...], concurrency: int, requests: int, seed: int
) -> Stream:
    """Draws edits in random order, so many at a time; an edit comes again when all have come.

    An answer is as long as the true one, whatever the model answers.
    """
    rng = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < requests:
        order += rng.permutation(len(edits)).tolist()
    drawn = [edits[index] for index in order[:requests]]
    played = tuple(
        Request(RequestId(edit.kind, number, len(edit.answer)), edit.prompt)
        for number, edit in enumerate(drawn)
    )
    plan = PhasePlan(
        name,
        tuple(sorted({edit.kind for edit in edits})),
        concurrency,
        requests,
        round(float(np.mean([len(edit.answer) for edit in drawn]))),
        round(float(np.mean([len(edit.prompt) for edit in drawn]))),
    )
    return Stream(name, seed, (Phase(plan, played),))
