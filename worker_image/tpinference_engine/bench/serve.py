"""`bench serve`: a server over HTTP under requests that arrive at a given rate."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from tpinference_engine.bench.arrival import arrival_times_s
from tpinference_engine.bench.client import Answer, ServerFailed, ask, first_model
from tpinference_engine.bench.prompt import TokenIds, random_prompts
from tpinference_engine.bench.settings import Metric, ServeBench
from tpinference_engine.bench.statistic import Statistic, summarize

PROMPT_VOCABULARY = 128
"""Ids below it are in every vocabulary; which ones they are makes no difference to the time."""

_TITLES: dict[Metric, tuple[str, str]] = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeResult:
    bench: ServeBench
    duration_s: float
    answers: tuple[Answer, ...]
    errors: tuple[str, ...]
    """Of requests that failed."""

    @property
    def num_input_tokens(self) -> int:
        return len(self.answers) * self.bench.random_input_len

    @property
    def num_output_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    def values_ms(self, metric: Metric) -> list[float]:
        match metric:
            case "ttft":
                seconds = [answer.ttft_s for answer in self.answers]
            case "tpot":
                found = (answer.tpot_s for answer in self.answers)
                seconds = [value for value in found if value is not None]
            case "itl":
                seconds = [value for answer in self.answers for value in answer.itl_s]
            case "e2el":
                seconds = [answer.e2el_s for answer in self.answers]
        return [1000 * value for value in seconds]

    def statistic_ms(self, metric: Metric) -> Statistic:
        return summarize(self.values_ms(metric), self.bench.metric_percentiles)

    @property
    def text(self) -> str:
        rows = [_heading("Serving Benchmark Result", "="), *map(_row, self._totals())]
        for metric in self.bench.percentile_metrics:
            title, short = _TITLES[metric]
            found = self.statistic_ms(metric)
            rows += [
                _heading(title, "-"),
                _row((f"Mean {short} (ms):", found.mean)),
                _row((f"Median {short} (ms):", found.median)),
            ]
            rows += [
                _row((f"P{percent} {short} (ms):", value))
                for percent, value in found.percentiles.items()
                if percent != "50"
            ]
        rows.append("=" * 50)
        rows += [f"failed: {error}" for error in sorted(set(self.errors))]
        return "\n".join(rows)

    def _totals(self) -> list[tuple[str, int | float]]:
        per_second = 1 / self.duration_s
        num_tokens = self.num_input_tokens + self.num_output_tokens
        return [
            ("Successful requests:", len(self.answers)),
            ("Failed requests:", len(self.errors)),
            ("Benchmark duration (s):", self.duration_s),
            ("Total input tokens:", self.num_input_tokens),
            ("Total generated tokens:", self.num_output_tokens),
            ("Request throughput (req/s):", len(self.answers) * per_second),
            ("Output token throughput (tok/s):", self.num_output_tokens * per_second),
            ("Total token throughput (tok/s):", num_tokens * per_second),
        ]

    @property
    def json(self) -> dict[str, Any]:
        """vLLM's keys."""
        per_second = 1 / self.duration_s
        num_tokens = self.num_input_tokens + self.num_output_tokens
        totals: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": len(self.answers),
            "failed": len(self.errors),
            "total_input_tokens": self.num_input_tokens,
            "total_output_tokens": self.num_output_tokens,
            "request_throughput": len(self.answers) * per_second,
            "output_throughput": self.num_output_tokens * per_second,
            "total_token_throughput": num_tokens * per_second,
        }
        for metric in self.bench.percentile_metrics:
            found = self.statistic_ms(metric)
            totals[f"mean_{metric}_ms"] = found.mean
            totals[f"median_{metric}_ms"] = found.median
            totals[f"std_{metric}_ms"] = found.std
            for percent, value in found.percentiles.items():
                totals[f"p{percent}_{metric}_ms"] = value
        return totals


async def measure_serving(bench: ServeBench) -> ServeResult:
    """Raises ServerFailed if the server does not answer one request as it should."""
    prompts = random_prompts(
        bench.num_prompts + 1,
        bench.random_input_len,
        vocab_size=PROMPT_VOCABULARY,
        seed=bench.seed,
    )
    times = arrival_times_s(bench.num_prompts, bench.request_rate, seed=bench.seed)
    base_url = bench.base_url.rstrip("/")
    # No bound of the client's own: what is bounded is asked for by max_concurrency.
    unbounded = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=unbounded, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        model = bench.model or await first_model(session, base_url)
        # One in advance: a wrong name or length is told once, not a thousand times.
        await ask(session, base_url, model, prompts[0], bench.random_output_len)
        logger.info("%d requests to %s at %s", bench.num_prompts, model, base_url)
        began = time.perf_counter()

        async def send(prompt: TokenIds) -> Answer | str:
            try:
                return await ask(session, base_url, model, prompt, bench.random_output_len)
            except ServerFailed as error:
                return str(error)

        limit = asyncio.Semaphore(bench.max_concurrency) if bench.max_concurrency else None

        async def arrive(prompt: TokenIds, time_s: float) -> Answer | str:
            await asyncio.sleep(began + time_s - time.perf_counter())
            async with limit or contextlib.nullcontext():
                return await send(prompt)

        outcomes = await asyncio.gather(*map(arrive, prompts[1:], times))
        return make_result(bench, time.perf_counter() - began, outcomes)


def make_result(
    bench: ServeBench, duration_s: float, outcomes: Sequence[Answer | str]
) -> ServeResult:
    """Raises ServerFailed if nothing was answered."""
    answers = tuple(outcome for outcome in outcomes if isinstance(outcome, Answer))
    errors = tuple(outcome for outcome in outcomes if isinstance(outcome, str))
    if not answers:
        raise ServerFailed(f"all {len(errors)} requests failed, the first one: {errors[0]}")
    return ServeResult(bench=bench, duration_s=duration_s, answers=answers, errors=errors)


def _heading(title: str, line: str) -> str:
    return f" {title} ".center(50, line)


def _row(named: tuple[str, int | float]) -> str:
    name, value = named
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"
