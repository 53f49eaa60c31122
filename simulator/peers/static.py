"""One fixed arm: an engine with a static configuration.

Every serving engine takes a fixed draft length at start (SGLang `--speculative-num-steps`, vLLM
`num_speculative_tokens`, TensorRT-LLM `max_draft_len`) and keeps it.  It uses no telemetry.
"""

from collections.abc import Sequence

from controller.core.engine_spec import Arm
from controller.core.plan import MixtureRule
from simulator.errors import InvalidInputError
from simulator.policy import ArmChoice, NonLearningPolicy
from simulator.results import PolicyOrigin


class StaticPolicy(NonLearningPolicy):
    """Runs arms[arm_index] in every step.  Raises InvalidInputError for no such arm.

    rules: the rules by which an arm of a mixture chooses each row's drafter.
    """

    origin = PolicyOrigin.STATIC

    def __init__(
        self, arms: Sequence[Arm], arm_index: int, rules: Sequence[MixtureRule] = ()
    ) -> None:
        if not 0 <= arm_index < len(arms):
            raise InvalidInputError(
                "static", 0, f"arm {arm_index} does not exist, there are {len(arms)}"
            )
        self.arm = arms[arm_index]
        self._choice = ArmChoice(
            arm_index, rules=rules if self.arm in {r.arm for r in rules} else ()
        )

    def choose(self, _batch_size: int, _now: float) -> ArmChoice:
        """Returns the arm."""
        return self._choice
