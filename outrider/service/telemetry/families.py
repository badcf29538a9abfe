"""Makes Prometheus metrics that have the label `model_name`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from outrider.lossy_stream import num_lost_lines


class Followed(Collector):
    """A counter whose value is read at each scrape."""

    def __init__(self, name: str, help_text: str, model_name: str, read: Callable[[], float]) -> None:
        self._name, self._help_text, self._model_name, self._read = name, help_text, model_name, read

    def collect(self) -> Iterable[Metric]:
        counter = CounterMetricFamily(self._name, self._help_text, labels=("model_name",))
        counter.add_metric((self._model_name,), self._read())
        return (counter,)


class Family:
    """Makes metrics that share a registry and the label `model_name`."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._registry = registry

    def count_lost_log_lines(self) -> None:
        self.follow("outrider:log_lines_lost", "Lines of the log that could not be written.", num_lost_lines)

    def follow(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Makes a counter whose value is read at each scrape."""
        self._registry.register(Followed(name, help_text, self._model_name, read))

    def gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, ("model_name",), registry=self._registry).labels(self._model_name)

    def counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, ("model_name",), registry=self._registry).labels(self._model_name)

    def histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, help_text, ("model_name",), registry=self._registry, buckets=buckets)
        return histogram.labels(self._model_name)

    def labelled_counter(self, name: str, help_text: str, label: str) -> Callable[[str, float], None]:
        """Returns a function that adds to the series of a label value. Adding 0 creates the series."""
        counter = Counter(name, help_text, ("model_name", label), registry=self._registry)
        return lambda value, number: counter.labels(self._model_name, value).inc(number)

    def labelled_gauge(self, name: str, help_text: str, label: str) -> Callable[[Mapping[str, float]], None]:
        """Returns a function that replaces all series of the label with the given ones. Only one thread may call it."""
        gauge = Gauge(name, help_text, ("model_name", label), registry=self._registry)
        shown: set[str] = set()

        def show(numbers: Mapping[str, float]) -> None:
            for value in shown - numbers.keys():
                gauge.remove(self._model_name, value)
            for value, number in numbers.items():
                gauge.labels(self._model_name, value).set(number)
            shown.clear()
            shown.update(numbers)

        return show
