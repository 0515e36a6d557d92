"""`bench throughput`: many requests at once, and how many tokens a second come of it."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from tpinference_engine.bench.engine_run import make_requests, read_to_end, running_engine
from tpinference_engine.bench.prompt import random_prompts
from tpinference_engine.bench.settings import ThroughputBench, check_lengths
from tpinference_engine.model.config import read_model_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputResult:
    elapsed_s: float
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_input_tokens + self.num_output_tokens

    @property
    def text(self) -> str:
        per_second = 1 / self.elapsed_s
        return (
            f"Throughput: {self.num_requests * per_second:.2f} requests/s, "
            f"{self.num_tokens * per_second:.2f} total tokens/s, "
            f"{self.num_output_tokens * per_second:.2f} output tokens/s\n"
            f"Total num prompt tokens:  {self.num_input_tokens}\n"
            f"Total num output tokens:  {self.num_output_tokens}"
        )

    @property
    def json(self) -> dict[str, Any]:
        """vLLM's keys, and output tokens apart."""
        return {
            "elapsed_time": self.elapsed_s,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_tokens,
            "requests_per_second": self.num_requests / self.elapsed_s,
            "tokens_per_second": self.num_tokens / self.elapsed_s,
            "output_tokens_per_second": self.num_output_tokens / self.elapsed_s,
        }


async def measure_throughput(bench: ThroughputBench) -> ThroughputResult:
    model = read_model_config(bench.engine.model)
    check_lengths(
        ("random_input_len", bench.random_input_len),
        ("random_output_len", bench.random_output_len),
        model.limit_model_len(bench.engine.max_model_len),
    )
    prompts = random_prompts(
        bench.num_prompts,
        bench.random_input_len,
        vocab_size=model.vocab_size,
        seed=bench.engine.seed,
    )
    requests = make_requests(prompts, bench.random_output_len, name="prompt")
    async with running_engine(bench.engine, bench.num_prompts) as engine:
        logger.info("%d requests", bench.num_prompts)
        began = time.perf_counter()
        streams = [engine.generate(request) for request in requests]
        num_tokens = await asyncio.gather(*map(read_to_end, streams))
        elapsed_s = time.perf_counter() - began
    return ThroughputResult(
        elapsed_s=elapsed_s,
        num_requests=bench.num_prompts,
        num_input_tokens=bench.num_prompts * bench.random_input_len,
        num_output_tokens=sum(num_tokens),
    )
