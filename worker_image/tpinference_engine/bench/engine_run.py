"""A real engine for a benchmark: the asyncio face and a core process of its own, no HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tpinference_engine.bench.prompt import TokenIds
from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.engine.request_stream import RequestStream
from tpinference_engine.errors import GroupFailed
from tpinference_engine.request import FinishReason, Request, SamplingParams


@asynccontextmanager
async def running_engine(config: EngineConfig, max_requests: int) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(config, max_requests=max_requests)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.shutdown()


def make_requests(
    prompts: Sequence[TokenIds], output_len: int, *, name: str
) -> tuple[Request, ...]:
    """Random choice, and no end before `output_len`, as vLLM's benchmarks have it."""
    params = SamplingParams(max_tokens=output_len, temperature=1.0, ignore_eos=True)
    return tuple(
        Request(request_id=f"{name}-{index}", prompt_token_ids=prompt, params=params)
        for index, prompt in enumerate(prompts)
    )


async def read_to_end(stream: RequestStream) -> int:
    """Its number of tokens. Raises GroupFailed if it did not end by its length."""
    num_tokens = 0
    async for output in stream:
        num_tokens += len(output.token_ids)
        if output.finish_reason not in (None, FinishReason.LENGTH):
            raise GroupFailed(output.error or f"a request ended by {output.finish_reason}")
    return num_tokens
