"""What the plugin reads of vLLM's objects, and nothing else of them."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from engine_shim.link.plan_follower import Source, StepChoice
from speculation.v1.engine_pb2 import StepReport
from tests.support.step_reports import fill_report


def choice(gamma: int, epoch: int = 1, probe: int = 0, source: Source = Source.PLAN) -> StepChoice:
    return StepChoice(0, gamma, False, epoch, probe, source, 9)


class Link:
    """Keeps reports, and answers with the choices it was given; then with the last one again."""

    def __init__(self, *choices: StepChoice) -> None:
        self.reports: list[StepReport] = []
        self.asked: list[int] = []
        self.polls = 0
        self._choices = list(choices)
        self.plan_follower = SimpleNamespace(
            safe_default=choice(7, 0, source=Source.SAFE_DEFAULT), drafter_names=("eagle3",)
        )

    def choose(self, batch_size: int) -> StepChoice:
        self.asked.append(batch_size)
        return self._choices.pop(0) if len(self._choices) > 1 else self._choices[0]

    def poll(self) -> None:
        self.polls += 1

    def report(self, fill: Callable[[StepReport], None]) -> bool:
        self.reports.append(fill_report(fill))
        return True

    def report_lost_capability(self, _: Any) -> None: ...

    def close(self) -> None: ...


# Caches of attention layers alone.
CACHES = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace())])


def request(
    name: str, prompt: int = 10, output: int = 1, extra: object = None, **fields: Any
) -> SimpleNamespace:
    """A request that has been computed up to its newest token, and is decoding if it has one."""
    defaults = {
        "request_id": name,
        "num_tokens": prompt + output,
        "num_output_tokens": output,
        "num_computed_tokens": prompt + output - 1 if output else 0,
        "num_output_placeholders": 0,
        "use_structured_output": False,
        "spec_token_ids": [],
        "is_finished": lambda: False,
        "sampling_params": SimpleNamespace(extra_args=extra),
    }
    return SimpleNamespace(**(defaults | fields))


def output(
    scheduled: Mapping[str, int],
    drafts: Mapping[str, int] | None = None,
    finished: Any = (),
    preempted: Any = (),
) -> SimpleNamespace:
    """A SchedulerOutput.  drafts: how many of each request are verified."""
    return SimpleNamespace(
        num_scheduled_tokens=dict(scheduled),
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={name: [5] * n for name, n in (drafts or {}).items()},
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
        num_spec_tokens_to_schedule=7,
    )


def result(sampled: Mapping[str, int]) -> SimpleNamespace:
    """A ModelRunnerOutput.  sampled: how many tokens each request got."""
    return SimpleNamespace(
        sampled_token_ids=[[5] * n for n in sampled.values()],
        req_id_to_index={name: place for place, name in enumerate(sampled)},
    )
