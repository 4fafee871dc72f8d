"""Families of metrics: a name, its meaning, and plain numbers by the values of the labels.

Events are counted as plain numbers, which are converted to Prometheus metrics only when they are read. The result of
`now` is plain data, which the processes of one server exchange and sum up (`total`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
"""The values of a family's labels, in the order of the labels; () without labels."""
Numbers = Mapping[Labels, float]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Bucket bounds for durations that depend on a client or a model."""
SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bucket bounds for durations of the server itself."""


class Family(ABC):
    """A family of metrics. `labels` must have few values: never ids, model names or paths sent by clients."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        """`name`: the Prometheus name, without the `_total` of a counter. `text`: its meaning, for the HELP line."""
        self.name, self.text, self.labels = name, text, labels

    @abstractmethod
    def now(self) -> Any:
        """The current numbers, as plain data that later counts do not change."""

    @abstractmethod
    def total(self, alive: Sequence[Any], gone: Sequence[Any]) -> Any:
        """The combined numbers of several processes.

        `alive`: the numbers of processes that are alive, the answering process first. `gone`: the numbers of processes
        that have ended. Their counts are included, or a sum would fall.
        """

    @abstractmethod
    def metric(self, data: Any) -> Metric:
        """The numbers of this family as a Prometheus metric."""


class Numbered(Family):
    """A family with one number per label values. `by`: the numbers, by labels; missing labels are not shown."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(name, text, *labels)
        self.by: dict[Labels, float] = {}
        self._read: Callable[[], Numbers | float] | None = None

    def watch(self, read: Callable[[], Numbers | float]) -> None:
        """Call `read` for the numbers whenever they are read."""
        self._read = read

    def now(self) -> Numbers:
        read = self.by if self._read is None else self._read()
        return {(): read} if isinstance(read, int | float) else dict(read)


class Counts(Numbered):
    """A counter of events, in whole numbers where this server counts them."""

    by: Counter[Labels]  # type: ignore[assignment]

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(name, text, *labels)
        self.by = Counter() if labels else Counter({(): 0})

    def expect(self, known: Iterable[Labels]) -> None:
        """Show these labels with 0 until they are counted. Otherwise Prometheus would not see the first increase."""
        for labels in known:
            self.by[labels] += 0

    def total(self, alive: Sequence[Numbers], gone: Sequence[Numbers]) -> Numbers:
        return _sum([*alive, *gone])

    def metric(self, data: Numbers) -> Metric:
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for labels, number in data.items():
            family.add_metric(labels, number)
        return family


class Merge(Enum):
    """How the gauges of several processes are merged: the sum, an extreme, or the value of the answering process."""

    SUM = 0
    MOST = 1
    LEAST = 2
    OWN = 3


class Gauge(Numbered):
    """A gauge: a current value."""

    def __init__(self, name: str, text: str, *labels: str, merge: Merge = Merge.SUM) -> None:
        super().__init__(name, text, *labels)
        self._merge = merge

    def total(self, alive: Sequence[Numbers], gone: Sequence[Numbers]) -> Numbers:
        match self._merge:
            case Merge.SUM:
                return _sum(alive)
            case Merge.OWN:
                return alive[0]
        choose = max if self._merge is Merge.MOST else min
        found: dict[Labels, list[float]] = {}
        for numbers in alive:
            for labels, number in numbers.items():
                found.setdefault(labels, []).append(number)
        return {labels: choose(values) for labels, values in found.items()}

    def metric(self, data: Numbers) -> Metric:
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        for labels, number in data.items():
            family.add_metric(labels, number)
        return family


Distribution = tuple[Sequence[int], float]
"""The number of values in each bucket, the last of which has no bound, and the sum of the values."""


class Histogram(Family):
    """A histogram with the same bounds for all labels. `counts`, `sums`: those of `Distribution`, by labels."""

    def __init__(self, name: str, text: str, *labels: str, bounds: Sequence[float] = SECONDS) -> None:
        super().__init__(name, text, *labels)
        self.bounds = bounds
        self.counts: dict[Labels, list[int]] = {}
        self.sums: dict[Labels, float] = {}
        if not labels:
            self.begin(())

    def observe(self, value: float, *labels: str) -> None:
        """Count one value."""
        observe_all(((self, labels, value),))

    def now(self) -> Mapping[Labels, Distribution]:
        return {labels: (list(counts), self.sums[labels]) for labels, counts in self.counts.copy().items()}

    def total(
        self, alive: Sequence[Mapping[Labels, Distribution]], gone: Sequence[Mapping[Labels, Distribution]]
    ) -> Mapping[Labels, Distribution]:
        found: dict[Labels, Distribution] = {}
        for distributions in (*alive, *gone):
            for labels, (counts, values) in distributions.items():
                before, earlier = found.get(labels, ([0] * len(counts), 0.0))
                found[labels] = [one + more for one, more in zip(before, counts, strict=True)], earlier + values
        return found

    def metric(self, data: Mapping[Labels, Distribution]) -> Metric:
        """The numbers as a Prometheus histogram, in which each bucket counts all values up to its bound."""
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        for labels, (counts, values) in data.items():
            total, buckets = 0, []
            for bound, count in zip(bounds, counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric(labels, buckets, values)
        return family

    def begin(self, labels: Labels) -> None:
        """Begin to count values with new labels."""
        self.sums[labels] = 0.0  # before the counts, from which another thread takes the labels
        self.counts[labels] = [0] * (len(self.bounds) + 1)


Seen = tuple[Histogram, Labels, float]
"""A value of a histogram, with its labels."""


def observe_all(seen: Iterable[Seen]) -> None:
    """Count several values. Cheaper than a call of `Histogram.observe` for each."""
    for histogram, labels, value in seen:
        if labels not in histogram.counts:
            histogram.begin(labels)
        histogram.counts[labels][bisect_left(histogram.bounds, value)] += 1
        histogram.sums[labels] += value


class Group:
    """A group of families, which are the attributes of an object."""

    def families(self) -> list[Family]:
        """The families, in the order of their definition."""
        return [value for value in vars(self).values() if isinstance(value, Family)]


def _sum(numbers: Iterable[Numbers]) -> Numbers:
    total: Counter[Labels] = Counter()
    for each in numbers:
        total.update(each)
    return total
