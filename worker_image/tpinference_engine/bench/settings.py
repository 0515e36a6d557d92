"""What a benchmark is asked to do, checked: flags have vLLM's names, so fields have them too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import InvalidConfig

Metric = Literal["ttft", "tpot", "itl", "e2el"]

LATENCY_PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How results are given out."""

    as_json: bool = False
    """On standard output, in place of the text."""
    file: Path | None = None
    """A file for the JSON, besides standard output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBench:
    """One batch of requests from its start to its end, again and again."""

    engine: EngineConfig
    report: Report = Report()
    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    num_iters_warmup: int = 10
    num_iters: int = 30

    def __post_init__(self) -> None:
        # More would wait for a slot, and that is no step's latency.
        if self.batch_size > self.engine.max_num_seqs:
            raise InvalidConfig(
                f"batch_size is {self.batch_size!r}, must be at most max_num_seqs "
                f"{self.engine.max_num_seqs!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputBench:
    """All requests at once, as fast as the engine takes them."""

    engine: EngineConfig
    report: Report = Report()
    num_prompts: int = 1000
    random_input_len: int = 1024
    random_output_len: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBench:
    """Requests over HTTP to a server that runs already."""

    base_url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """None = the first that the server names."""
    report: Report = Report()
    num_prompts: int = 1000
    random_input_len: int = 1024
    random_output_len: int = 128
    request_rate: float = math.inf
    """Requests a second, arriving as a Poisson process; infinite = all at once."""
    max_concurrency: int | None = None
    """Requests in flight at most; those that wait for it are not yet sent."""
    seed: int = 0
    percentile_metrics: tuple[Metric, ...] = ("ttft", "tpot", "itl")
    metric_percentiles: tuple[float, ...] = (99.0,)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise InvalidConfig(
                f"base_url is {self.base_url!r}, must begin with 'http://' or 'https://'"
            )
        if not self.request_rate > 0:
            raise InvalidConfig(
                f"request_rate is {self.request_rate!r}, must be greater than 0, or 'inf'"
            )
        for percent in self.metric_percentiles:
            if not 0 <= percent <= 100:
                raise InvalidConfig(f"metric_percentiles has {percent!r}, must be 0 to 100")


def check_lengths(input_len: tuple[str, int], output_len: tuple[str, int], limit: int) -> None:
    """Raises InvalidConfig for requests that the model could not finish. Each length with its
    flag's name."""
    total = input_len[1] + output_len[1]
    if total > limit:
        raise InvalidConfig(
            f"{input_len[0]} is {input_len[1]!r} and {output_len[0]} is {output_len[1]!r}, "
            f"must be at most {limit} together, the model's length"
        )
