"""`bench latency`: how long one batch takes, from the first prompt sent to the last token."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from tpinference_engine.bench.engine_run import make_requests, read_to_end, running_engine
from tpinference_engine.bench.prompt import TokenIds, random_prompts
from tpinference_engine.bench.settings import LATENCY_PERCENTILES, LatencyBench, check_lengths
from tpinference_engine.bench.statistic import format_percent, summarize
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.model.config import read_model_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LatencyResult:
    latencies_s: tuple[float, ...]

    @property
    def text(self) -> str:
        found = summarize(self.latencies_s, LATENCY_PERCENTILES)
        lines = [f"Avg latency: {found.mean:.6f} seconds"]
        for percent in map(format_percent, LATENCY_PERCENTILES):
            lines.append(f"{percent}% percentile latency: {found.percentiles[percent]:.6f} seconds")
        return "\n".join(lines)

    @property
    def json(self) -> dict[str, Any]:
        """vLLM's keys."""
        found = summarize(self.latencies_s, LATENCY_PERCENTILES)
        return {
            "avg_latency": found.mean,
            "latencies": list(self.latencies_s),
            "percentiles": found.percentiles,
        }


async def measure_latency(bench: LatencyBench) -> LatencyResult:
    model = read_model_config(bench.engine.model)
    check_lengths(
        ("input_len", bench.input_len),
        ("output_len", bench.output_len),
        model.limit_model_len(bench.engine.max_model_len),
    )
    # The same each time, as vLLM's are: a prefix cache has them after the first batch.
    prompts = random_prompts(
        bench.batch_size, bench.input_len, vocab_size=model.vocab_size, seed=bench.engine.seed
    )
    latencies: list[float] = []
    async with running_engine(bench.engine, bench.batch_size) as engine:
        logger.info("warming up with %d iterations", bench.num_iters_warmup)
        for number in range(bench.num_iters_warmup):
            await _run_batch(engine, prompts, bench.output_len, f"warmup-{number}")
        for number in range(bench.num_iters):
            latencies.append(
                await _run_batch(engine, prompts, bench.output_len, f"iteration-{number}")
            )
            logger.info("iteration %d of %d: %.6f s", number + 1, bench.num_iters, latencies[-1])
    return LatencyResult(tuple(latencies))


async def _run_batch(
    engine: AsyncEngine, prompts: tuple[TokenIds, ...], output_len: int, name: str
) -> float:
    requests = make_requests(prompts, output_len, name=name)
    began = time.perf_counter()
    streams = [engine.generate(request) for request in requests]
    await asyncio.gather(*map(read_to_end, streams))
    return time.perf_counter() - began
