"""The product's path on an accelerator: a rank under Ray, steps through a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.request import Request, SamplingParams

pytestmark = [
    pytest.mark.ray,
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

PROMPT = tuple(range(5, 40))
NUM_TOKENS = 16


async def generate(config: EngineConfig) -> list[int]:
    engine = AsyncEngine(config)
    try:
        await engine.start()
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        request = Request(request_id="a", prompt_token_ids=PROMPT, params=params)
        tokens: list[int] = []
        async for output in engine.generate(request):
            assert output.error is None
            tokens += output.token_ids
        return tokens
    finally:
        await engine.shutdown()


async def test_tokens_under_ray_equal_those_without(
    tiny_model: Callable[[str], Path], make_config: Callable[..., EngineConfig]
) -> None:
    """The graph's thread selects its device by itself, which only a first step shows."""

    def config(**changes: Any) -> EngineConfig:
        small = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 4}
        return make_config(
            model=tiny_model("llama-9-heads-3-kv"), device="cuda", **small, **changes
        )

    alone = await generate(config(distributed_executor_backend="uni"))
    under_ray = await generate(config(distributed_executor_backend="ray"))
    assert len(alone) == NUM_TOKENS
    assert under_ray == alone
