"""What a paced engine draws: the same luck for every policy."""

import pytest
import torch

from lab.cpu_engine.pace.acceptance import DrawnAcceptance, RequestId, accept

CURVES = {
    "code": {"eagle3": (0.8, 0.7, 0.6), "dflash": (0.8, 0.7, 0.6)},
    "prose": {"eagle3": (0.8, 0.7, 0.6), "dflash": (0.8, 0.7, 0.6)},
}
FIRST, SECOND, PROSE = (
    RequestId("code", 3, 400),
    RequestId("code", 4, 400),
    RequestId("prose", 3, 400),
)


def positions(drawn, request, drafter, order):
    return {p: drawn.accepted_at(str(request), drafter, p) for p in order}


def test_an_id_is_read_back_and_another_text_is_none():
    assert RequestId.parse(str(FIRST)) == FIRST
    assert RequestId.parse("HEALTH_CHECK_17") is None
    assert RequestId.parse("code.x.400") is None
    assert RequestId.parse("code.3") is None


def test_draws_depend_neither_on_the_order_nor_on_what_else_is_asked():
    forwards, backwards = DrawnAcceptance(CURVES), DrawnAcceptance(CURVES)
    own = positions(forwards, FIRST, "eagle3", range(400))
    backwards.accepted_at(str(SECOND), "dflash", 7)
    other = positions(backwards, FIRST, "eagle3", reversed(range(400)))
    assert own == other
    forwards.forget(str(FIRST))
    assert positions(forwards, FIRST, "eagle3", range(400)) == own
    assert list(own.values()) == forwards.accepted(FIRST, "eagle3").tolist()


@pytest.mark.parametrize(
    ("request_id", "drafter"), [(SECOND, "eagle3"), (PROSE, "eagle3"), (FIRST, "dflash")]
)
def test_the_request_and_the_drafter_each_change_the_draws(request_id, drafter):
    usual = DrawnAcceptance(CURVES).accepted(FIRST, "eagle3")
    assert (DrawnAcceptance(CURVES).accepted(request_id, drafter) != usual).sum() > 100


def test_draws_follow_the_curve():
    drawn = DrawnAcceptance(CURVES).accepted(RequestId("code", 1, 20_000), "eagle3")
    shares = [float((drawn >= k).mean()) for k in (1, 2, 3, 4)]
    assert shares == pytest.approx([0.8, 0.56, 0.336, 0.0], abs=0.015)


def test_nothing_is_accepted_beyond_the_end_nor_without_a_class():
    drawn = DrawnAcceptance({"code": {"eagle3": (1.0,)}})
    assert drawn.accepted_at("code.1.5", "eagle3", 4) == 1
    assert drawn.accepted_at("code.1.5", "eagle3", 5) == 0
    assert drawn.accepted_at("HEALTH_CHECK_17", "eagle3", 0) == 0
    assert drawn.accepted_at("unknown.1.5", "eagle3", 0) == 0


def test_a_class_without_a_drafters_curve_is_refused():
    drawn = DrawnAcceptance({"code": {"eagle3": (0.5,)}})
    drawn.require(["eagle3"])
    with pytest.raises(ValueError, match="'code' has no acceptance curve for \\['dflash'\\]"):
        drawn.require(["eagle3", "dflash"])


def test_acceptance_is_written_as_sglang_reads_it():
    """Row r's tokens are at 4 r, 4 r + 1, ... in `predict`; -1 ends a row."""
    index = torch.tensor([[0, -1, -1, -1], [4, 5, -1, -1], [8, -1, -1, -1]], dtype=torch.int32)
    predict, correct = torch.zeros(12, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    accept_index = accept(index, predict, correct, [0, 2, 7], 3)
    assert accept_index.tolist() == [[0, -1, -1, -1], [4, 5, 6, -1], [8, 9, 10, 11]]
    assert accept_index.dtype == torch.int32
    assert correct.tolist() == [0, 2, 3]
    assert len(set(predict.tolist())) == 1
