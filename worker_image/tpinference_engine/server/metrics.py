"""What /metrics tells: names, labels and buckets of vLLM's metrics under our own prefix.

A dashboard made for vLLM needs another prefix and nothing else. One registry an engine, not the
process-wide one: two engines in one process don't mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tpinference_engine.engine.messages import StepReport

PREFIX = "tpinference_"
_LABELS = ("model_name", "engine")
_ENGINE = "0"
"""vLLM numbers the engines of a server; here it has one."""
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_STEP_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 10.0,
)  # fmt: skip
_SKEW_S = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 1.0)
LATE_US = 20
"""A wait for work that is done already takes less."""
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUEST_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that is read at each scrape."""

    help: str
    value: float
    kind: Literal["gauge", "counter"] = "gauge"
    labels: tuple[tuple[str, str], ...] = ()


Readings = Callable[[], Mapping[str, Reading]]
"""By name, without prefix."""


class _ReadingCollector(Collector):
    def __init__(self, readings: Readings, model_name: str) -> None:
        self._readings = readings
        self._values = (model_name, _ENGINE)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for name, reading in self._readings().items():
            make = GaugeMetricFamily if reading.kind == "gauge" else CounterMetricFamily
            family = make(
                PREFIX + name, reading.help, labels=[*_LABELS, *(key for key, _ in reading.labels)]
            )
            values = [*self._values, *(value for _, value in reading.labels)]
            family.add_metric(values, reading.value)
            yield family


class Metrics:
    def __init__(self, readings: Readings, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ReadingCollector(readings, model_name))
        self._model_name = model_name
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens in answers.")
        self._request_success = self._labelled(
            "request_success", "Choices that ended as they should.", "finished_reason"
        )
        self._request_failure = self._labelled(
            "request_failure", "Calls answered with an error, or left by the client.", "code"
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "One token to the next.", _TOKEN_S
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to the end of the answer.", _REQUEST_S
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Tokens of a request's prompt.", _REQUEST_TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens of a request's answer.", _REQUEST_TOKENS
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds",
            "Arrival in the engine core to the first step.",
            _REQUEST_S,
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS
        )
        self._step_seconds = self._histogram("step_seconds", "One step to the next.", _STEP_S)
        self._device_wait = self._histogram(
            "step_device_wait_seconds",
            "By how much a step came before its device was free, to the rank that waited least.",
            _SKEW_S,
        )
        self._rank_skew = self._histogram(
            "step_rank_skew_seconds", "What the slowest rank was behind the fastest.", _SKEW_S
        )
        self._late_steps = self._counter(
            "late_steps", "Steps that found a device idle which had just been at work."
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def count_success(self, finished_reason: str) -> None:
        self._request_success.labels(self._model_name, _ENGINE, finished_reason).inc()

    def count_failure(self, code: str) -> None:
        self._request_failure.labels(self._model_name, _ENGINE, code).inc()

    def observe_step(self, step: StepReport) -> None:
        self._step_tokens.observe(step.num_tokens)
        self._step_seconds.observe(step.seconds)
        for queued_s in step.queued_s:
            self._queue_time.observe(queued_s)
        if step.waited_for_step:
            least_us, most_us = min(step.skews_us), max(step.skews_us)
            self._device_wait.observe(least_us / 1e6)
            self._rank_skew.observe((most_us - least_us) / 1e6)
            self._late_steps.inc(least_us < LATE_US)

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled(name, text).labels(self._model_name, _ENGINE)

    def _labelled(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, (*_LABELS, *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(PREFIX + name, text, _LABELS, buckets=buckets, registry=self._registry)
        return made.labels(self._model_name, _ENGINE)
