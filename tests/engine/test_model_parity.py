"""Greedy tokens in float32 equal those of transformers, for each family and number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpinference_engine.config import EngineConfig

MODELS = [
    "llama-9-heads-3-kv",
    "llama-rope-llama3-biases",
    "llama-rope-linear",
    "mistral-wide-heads",
    "qwen2-biases",
    "qwen3-qk-norm",
]
SIZES = [1, 2, 3]
NUM_TOKENS = 20


def prompts() -> list[list[int]]:
    """Long enough to leave the lengths that scaled positions were trained for."""
    source = random.Random(1)
    return [[source.randrange(199) for _ in range(length)] for length in (60, 1, 7, 33)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_batched_greedy_tokens_equal_transformers(
    name: str,
    size: int,
    tiny_model: Callable[[str], Path],
    reference: Callable[[Path], Any],
    make_config: Callable[..., EngineConfig],
    make_driver: Any,
) -> None:
    directory = tiny_model(name)
    config = make_config(model=directory, tensor_parallel_size=size, max_num_batched_tokens=40)
    found = make_driver(config).generate(prompts(), NUM_TOKENS)
    assert found == [reference(directory).generate(p, NUM_TOKENS) for p in prompts()]
