"""Selects the plain steps of the wanted batch, and explains why others are not."""

from collections import Counter
from collections.abc import Collection

from controller.core.engine_spec import Arm
from controller.core.step_report import StepReport


class StepFilter:
    """Takes reports in order.  `settle_steps`: how many are left out after anything changed.

    uneven: names of the drafters whose rows differ by their nature: mixtures, and lookups, which
    find nothing in some rows.
    """

    def __init__(self, settle_steps: int, uneven: Collection[str] = ()) -> None:
        self._settle_steps = settle_steps
        self._uneven = frozenset(uneven)
        self._unsettled = 0
        self._batch_size = 0
        self._context_tokens = range(0)
        self._last: tuple[Arm, int] | None = None
        # Why reports were left out, for people; the user empties it.
        self.left_out: Counter[str] = Counter()

    def expect(self, batch_size: int, context_tokens: range) -> None:
        """Counts steps of this batch size and of such contexts (their mean) from now on."""
        self._batch_size = batch_size
        self._context_tokens = context_tokens
        self._last = None

    def accepts(self, report: StepReport) -> bool:
        """True for a step whose seconds are those of its arm at the wanted batch size."""
        why = self._why_not(report)
        if why:
            self.left_out[why] += 1
        return not why

    def _why_not(self, report: StepReport) -> str:
        now = (report.arm, report.batch_size)
        if now != self._last:
            self._last = now
            self._unsettled = self._settle_steps
        if report.batch_size != self._batch_size:
            return f"batch of {report.batch_size}"
        context = report.kv_tokens // report.batch_size
        if context not in self._context_tokens:
            return f"context of about {round(context, -2)} tokens"
        if report.flags.unsteered:
            return "ran without a valid plan"
        return self._why_disturbed(report)

    def _why_disturbed(self, report: StepReport) -> str:
        flags = report.flags
        if flags.distorts_cost or flags.switched:
            # What disturbed this step may still be felt in the next.
            self._unsettled = max(self._unsettled - 1, 1)
            names = (
                "after_gap", "eager_fallback", "first_use", "mixed_choice", "switched", "updating",
            )  # fmt: skip
            return f"flagged {next(name for name in names if getattr(flags, name))}"
        if report.prefill_tokens:
            return "read prompts beside decoding"
        if (widths := other_widths(report)) and report.drafter not in self._uneven:
            return f"verified {widths} in some rows of gamma {report.gamma}"
        settled, self._unsettled = not self._unsettled, max(self._unsettled - 1, 0)
        return "" if settled else "right after a change"

    def width_of(self, report: StepReport) -> int:
        """Returns the draft length that a step verified: the largest of its rows.

        Rows of an uneven drafter may all verify less than their step was to.
        """
        if not report.groups or report.drafter in self._uneven:
            return report.gamma
        return max(group.gamma for group in report.groups)


def other_widths(report: StepReport) -> str:
    """Names the draft lengths of rows that verified another one than their step; "" for none."""
    widths = {group.gamma for group in report.groups} - {report.gamma}
    return " and ".join(f"gamma {width}" for width in sorted(widths))
