"""Describes a metric once for the scrape, the reference and the tests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Source = TypeVar("Source")
# By value of the family's own label, or alone where it has none.  None: nothing to say now.
Reading = float | Mapping[str, float] | None


class MetricKind(Enum):
    """A counter only grows, and starts again at zero with an engine's next session."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Family(Generic[Source]):
    """Describes one metric.

    name: a counter's samples have `_total` behind it.  label: its own, beside `engine` where it is
    of an engine; "" = none.  like: what vLLM or SGLang call the same.
    """

    kind: MetricKind
    name: str
    text: str
    read: Callable[[Source], Reading]
    unit: str = ""
    label: str = ""
    like: str = ""

    @property
    def sample_name(self) -> str:
        """Returns the name that queries use."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name

    def empty(self, *common: str) -> CounterMetricFamily | GaugeMetricFamily:
        """Makes prometheus_client's family without samples.  common: labels before its own."""
        make = CounterMetricFamily if self.kind is MetricKind.COUNTER else GaugeMetricFamily
        return make(self.name, self.text, labels=[*common, *([self.label] if self.label else [])])


def samples(family: Family[Source], source: Source) -> tuple[tuple[tuple[str, ...], float], ...]:
    """(value of its own label, if it has one; number) of everything that it has to say now."""
    reading = family.read(source)
    if reading is None:
        return ()
    if isinstance(reading, Mapping):
        return tuple(((value,), float(number)) for value, number in reading.items())
    return (((), float(reading)),)
