"""Runs all checks of one engine's reports, and puts what they find into words.

No decision reads anything here.
"""

from collections.abc import Iterator

from controller.core.checks.acceptance_check import SUSPECT_TOKENS, AcceptanceCheck
from controller.core.checks.step_time_check import FlatStepTime, StepTimeCheck
from controller.core.checks.warning import EngineWarning, WarningKind
from controller.core.checks.width_check import OtherWidth, WidthCheck
from controller.core.engine_spec import EngineSpec
from controller.core.model_shapes import WEIGHTLESS
from controller.core.plan import Plan
from controller.core.step_report import StepReport

_NO_ACCEPTANCE_ADVICE = (
    "the drafter does not fit: see whether the method is its checkpoint's (EAGLE-3 under EAGLE, or "
    "the reverse), it was trained for this target and revision, vocabulary or hot-token map are "
    "the target's, it reads the layers that it was trained on (vLLM's second model runner ignores "
    "eagle_config.eagle_aux_hidden_state_layer_ids), and quantization and rope settings match; "
    "docs/failures.md, 'Engine warnings'"
)
_OTHER_WIDTH_ADVICE = (
    "the engine does not follow the draft length of its plan: see docs/compatibility.md for its "
    "version, method and model runner, and install one version of shim and sidecar; until then a "
    "choice has no effect"
)
_FLAT_ADVICE = (
    "the engine may draft its full length whatever it is asked for (see docs/compatibility.md for "
    "its version, method and model runner), or its steps wait for something other than the GPU"
)


class EngineChecks:
    """Holds the checks of one engine.  `observe`, `time` and `expect` feed them.

    acceptance: by drafter, those with weights.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.acceptance = {
            d.name: AcceptanceCheck(d.gammas[-1])
            for d in spec.drafters
            if d.kind not in WEIGHTLESS and d.gammas[-1]
        }
        self._widths = WidthCheck(any_larger=spec.fingerprint.data_parallel_size > 1)
        self._times = StepTimeCheck(spec.drafters)

    def expect(self, plan: Plan) -> None:
        """Takes a plan as it is issued."""
        self._widths.expect(plan)

    def observe(self, report: StepReport, *, measured: bool) -> None:
        """Takes a step.  measured: under a measurement's load, whose text is no traffic."""
        self._widths.observe(report)
        if measured:
            return
        if report.flags.drafter_reset:
            self._forget_learner()
        shown = report.shown if report.proposals else {}
        for name, check in self.acceptance.items():
            if check.has_worked:
                continue
            if name == report.drafter and report.gamma:
                check.fold(*report.drafted)
            elif name in shown:
                check.fold(*shown[name])
            check.pass_step()

    def _forget_learner(self) -> None:
        """Starts again with a drafter that has other weights now, unless it has worked."""
        learner = self.spec.learner
        check = self.acceptance.get(learner.name)
        if check is not None and not check.has_worked:
            self.acceptance[learner.name] = AcceptanceCheck(learner.gammas[-1])

    def time(self, report: StepReport, seconds: float) -> None:
        """Takes the seconds of a plain step, without what a change of arm cost."""
        self._times.observe(report, seconds)

    def continue_from(self, before: "EngineChecks") -> None:
        """Goes on from the session before of the same engine, if it has not become another one.

        Where its version or a drafter differs, what has worked before may not fit any more.
        """
        ours, theirs = self.spec, before.spec
        if (ours.fingerprint, ours.drafters) == (theirs.fingerprint, theirs.drafters):
            self.acceptance = before.acceptance

    def warnings(self) -> tuple[EngineWarning, ...]:
        """Returns what is wrong at present, in a fixed order."""
        return (*self._rejected(), *map(_other_width, self._widths.found()), *self._flat())

    def _rejected(self) -> Iterator[EngineWarning]:
        for name, check in self.acceptance.items():
            if check.is_suspect:
                yield EngineWarning(
                    WarningKind.NO_ACCEPTANCE,
                    name,
                    f"drafter {name} has never worked: {check.tokens:.2f} tokens a sequence and "
                    f"step in {check.drafts} verified drafts since its first one, {check.steps} "
                    f"steps ago; below {SUSPECT_TOKENS:g} hardly a draft is accepted",
                    _NO_ACCEPTANCE_ADVICE,
                )

    def _flat(self) -> Iterator[EngineWarning]:
        for flat in self._times.found():
            yield EngineWarning(
                WarningKind.FLAT_STEP_TIME, flat.drafter, _flat_text(flat), _FLAT_ADVICE
            )


def _other_width(other: OtherWidth) -> EngineWarning:
    arm = other.arm
    return EngineWarning(
        WarningKind.OTHER_WIDTH,
        arm.drafter,
        f"the plan asks for {arm.drafter} gamma {arm.gamma}, the engine verifies gamma "
        f"{other.verified}: {other.share:.0%} of the last {other.steps} such steps ran another "
        "draft length",
        _OTHER_WIDTH_ADVICE,
    )


def _flat_text(flat: FlatStepTime) -> str:
    return (
        f"a step of {flat.drafter} takes no longer at gamma {flat.long} than at gamma {flat.short} "
        f"({flat.difference:+.1%} +- {flat.error:.1%}, {flat.pairs} pairs of steps in batches of "
        f"up to {flat.batch_size})"
    )
