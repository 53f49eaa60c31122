"""One engine at the time of a scrape."""

from dataclasses import dataclass

from controller.core.engine.explanation import ArmValue, Explanation
from controller.core.engine.prediction_audit import gains
from controller.service.sessions.session import EngineSession


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """A session, with its decision row at the last reported batch size.

    chosen: the arm that is planned there.
    """

    session: EngineSession
    explanation: Explanation
    chosen: ArmValue

    @classmethod
    def of(cls, session: EngineSession) -> "EngineSnapshot":
        """Takes the present state of a session."""
        last = session.last_report
        explanation = session.core.explain(last.batch_size if last else 1)
        return cls(session, explanation, next(arm for arm in explanation.arms if arm.chosen))

    @property
    def drafts_by_length(self) -> list[int]:
        """Drafts by accepted tokens, from 0 to the engine's largest draft length."""
        return _filled(self.session.counters.drafts_by_length, self._gamma_max + 1)

    @property
    def accepted_by_position(self) -> list[int]:
        """Accepted draft tokens by position, up to the engine's largest draft length."""
        return _filled(self.session.counters.accepted_by_position, self._gamma_max)

    @property
    def _gamma_max(self) -> int:
        return max(arm.gamma for arm in self.session.spec.arms)

    @property
    def gains(self) -> dict[str, float]:
        """Estimated tokens per second over other choices, see `account`."""
        values = {value.arm: value.tokens_per_second for value in self.explanation.arms}
        return gains(values, self.session.spec, self.chosen.arm)


def _filled(counts: list[int], length: int) -> list[int]:
    """Adds zeros, so that every series is there from the start."""
    return counts + [0] * (length - len(counts))
