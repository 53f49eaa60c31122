"""Describes a metric once for the scrape, the reference and the tests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

Source = TypeVar("Source")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Counts observations of integers.  counts: entry k = observations of exactly k."""

    counts: Sequence[float]

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Returns pairs (upper bound, observations up to it); the last bound is infinite."""
        found, total = [], 0.0
        for value, count in enumerate(self.counts):
            total += count
            found.append((str(float(value)), total))
        return [*found, ("+Inf", total)]

    @property
    def sum(self) -> float:
        """Returns the sum of the observations."""
        return sum(value * count for value, count in enumerate(self.counts))


# Values by the family's own label, or one value if it has no label.  None: no value now.
Reading = float | Distribution | Mapping[str, float] | None
AnyFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class MetricKind(Enum):
    """Lists the kinds of metrics; counters start again at zero with an engine's next session."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_SUFFIXES = {MetricKind.COUNTER: "_total", MetricKind.GAUGE: "", MetricKind.HISTOGRAM: "_bucket"}


@dataclass(frozen=True, slots=True)
class Family(Generic[Source]):
    """Describes one metric.

    name: samples of a counter append `_total`, those of a histogram `_bucket`, `_sum` and `_count`.
    text: the help text.  read: returns the value.  label: its own label, in addition to `engine`
    for metrics of an engine; "" = none; a histogram has `le`.  like: the same metric of vLLM or
    SGLang.
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
        """Returns the name of its samples, as in queries."""
        return f"{self.name}{_SUFFIXES[self.kind]}"

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns its own labels, as in queries."""
        if self.kind is MetricKind.HISTOGRAM:
            return ("le",)
        return (self.label,) if self.label else ()

    def empty(self, *common: str) -> AnyFamily:
        """Makes prometheus_client's family, without samples.  common: labels before its own."""
        if self.kind is MetricKind.HISTOGRAM:
            return HistogramMetricFamily(self.name, self.text, labels=common)
        make = CounterMetricFamily if self.kind is MetricKind.COUNTER else GaugeMetricFamily
        return make(self.name, self.text, labels=[*common, *self.labels])


Samples = tuple[tuple[tuple[str, ...], float | Distribution], ...]


def samples(family: Family[Source], source: Source) -> Samples:
    """Returns pairs (values of its own labels, number) of all its samples now."""
    reading = family.read(source)
    if reading is None:
        return ()
    if isinstance(reading, Mapping):
        return tuple(((value,), float(number)) for value, number in reading.items())
    return (((), reading if isinstance(reading, Distribution) else float(reading)),)


def write(found: Samples, into: AnyFamily, *common: str) -> None:
    """Adds samples to prometheus_client's family.  common: values of the labels before its own."""
    for labels, number in found:
        if isinstance(number, Distribution):
            assert isinstance(into, HistogramMetricFamily)
            into.add_metric([*common], buckets=number.buckets, sum_value=number.sum)
        else:
            assert not isinstance(into, HistogramMetricFamily)
            into.add_metric([*common, *labels], number)
