import pytest

from lab.gpu_check.parts.graphs import EagerSteps
from speculation.v1 import engine_pb2


@pytest.mark.parametrize(
    ("gamma", "batch_size", "eager", "beyond"),
    [(3, 4, 1, 0), (3, 8, 1, 0), (3, 9, 0, 1), (7, 4, 1, 0), (7, 5, 0, 1)],
)
def test_an_eager_step_counts_up_to_the_largest_captured_batch(
    gamma: int, batch_size: int, eager: int, beyond: int
):
    steps = EagerSteps((1, 4, 8), {"3": {"largest_batch": None}, "7": {"largest_batch": 4}})
    flags = engine_pb2.StepFlags(eager_fallback=True)
    report = engine_pb2.StepReport(
        drafter="dflash", gamma=gamma, batch_size=batch_size, flags=flags
    )
    steps.add([report, engine_pb2.StepReport(drafter="dflash", gamma=gamma, batch_size=1)])
    (arm,) = steps.document()["arms"]
    assert (arm["steps"], arm["eager_steps"], arm["beyond"]) == (2, eager, beyond)
