"""What /metrics tells: names as users of vLLM know them, under our own prefix.

One registry an engine, not the process-wide one: two engines in one process don't mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

Gauges = Callable[[], dict[str, tuple[str, float]]]
"""Read at each scrape: help and value by name."""

_PREFIX = "tpinference_"
_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class _GaugeCollector(Collector):
    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (text, value) in self._gauges().items():
            yield GaugeMetricFamily(_PREFIX + name, text, value)


class Metrics:
    def __init__(self, gauges: Gauges) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_GaugeCollector(gauges))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens in answers.")
        self.request_success = self._counter(
            "request_success", "Choices that ended as they should.", "finished_reason"
        )
        self.request_failure = self._counter(
            "request_failure", "Calls answered with an error, or left by the client.", "code"
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _LATENCY_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "One token to the next.", _LATENCY_BUCKETS
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to the end of the answer.", _REQUEST_BUCKETS
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self._registry)
