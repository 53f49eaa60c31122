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
        cumulative, total = [], 0.0
        for value, count in enumerate(self.counts):
            total += count
            cumulative.append((str(float(value)), total))
        return [*cumulative, ("+Inf", total)]

    @property
    def sum(self) -> float:
        """Returns the sum of the observations."""
        return sum(value * count for value, count in enumerate(self.counts))


# Values by the family's own label, or one value if it has no label.  None: no value now.
MetricValue = float | Distribution | Mapping[str, float] | None
AnyFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class MetricKind(Enum):
    """Lists the kinds of metrics; counters start again at zero with an engine's next session."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_SUFFIXES = {MetricKind.COUNTER: "_total", MetricKind.GAUGE: "", MetricKind.HISTOGRAM: "_bucket"}


@dataclass(frozen=True, slots=True)
class MetricFamily(Generic[Source]):
    """Describes one metric.

    name: samples of a counter append `_total`, those of a histogram `_bucket`, `_sum` and `_count`.
    help_text: the help text.  read_value: returns the value.  label: its own label, in addition to
    `engine` for metrics of an engine; "" = none; a histogram has `le`.  similar_metrics: the same
    metric of vLLM or SGLang.
    """

    kind: MetricKind
    name: str
    help_text: str
    read_value: Callable[[Source], MetricValue]
    unit: str = ""
    label: str = ""
    similar_metrics: str = ""

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

    def make_empty(self, *common: str) -> AnyFamily:
        """Makes prometheus_client's family, without samples.  common: labels before its own."""
        if self.kind is MetricKind.HISTOGRAM:
            return HistogramMetricFamily(self.name, self.help_text, labels=common)
        make = CounterMetricFamily if self.kind is MetricKind.COUNTER else GaugeMetricFamily
        return make(self.name, self.help_text, labels=[*common, *self.labels])


Samples = tuple[tuple[tuple[str, ...], float | Distribution], ...]


def samples(family: MetricFamily[Source], source: Source) -> Samples:
    """Returns pairs (values of its own labels, number) of all its samples now."""
    metric_value = family.read_value(source)
    if metric_value is None:
        return ()
    if isinstance(metric_value, Mapping):
        return tuple(((value,), float(number)) for value, number in metric_value.items())
    return (((), metric_value if isinstance(metric_value, Distribution) else float(metric_value)),)


def add_samples(metric_samples: Samples, metric_family: AnyFamily, *common: str) -> None:
    """Adds samples to prometheus_client's family.  common: values of the labels before its own."""
    for labels, number in metric_samples:
        if isinstance(number, Distribution):
            assert isinstance(metric_family, HistogramMetricFamily)
            metric_family.add_metric([*common], buckets=number.buckets, sum_value=number.sum)
        else:
            assert not isinstance(metric_family, HistogramMetricFamily)
            metric_family.add_metric([*common, *labels], number)
