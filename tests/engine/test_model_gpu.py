"""The same code on an accelerator: tokens of float32 equal transformers' on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tpinference_engine.config import EngineConfig
from tpinference_engine.runner import model_runner
from tpinference_engine.runner.graphs import DecodeGraphs
from tpinference_engine.runner.noise import gumbel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

NUM_TOKENS = 20


def prompts() -> list[list[int]]:
    source = random.Random(2)
    return [[source.randrange(199) for _ in range(length)] for length in (60, 1, 7, 33)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "name", ["llama-9-heads-3-kv", "llama-rope-llama3-biases", "qwen2-biases", "qwen3-qk-norm"]
)
def test_greedy_tokens_equal_transformers(  # noqa: PLR0913
    name: str,
    size: int,
    tiny_model: Callable[[str], Path],
    reference: Callable[[Path], Any],
    make_config: Callable[..., EngineConfig],
    make_driver: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if size > torch.cuda.device_count():
        # Two ranks of one accelerator, which NCCL refuses.
        monkeypatch.setitem(model_runner.GROUP_KINDS, "cuda", "gloo")
    directory = tiny_model(name)
    config = make_config(
        model=directory, device="cuda", tensor_parallel_size=size, max_num_batched_tokens=40
    )
    found = make_driver(config).generate(prompts(), NUM_TOKENS)
    assert found == [reference(directory).generate(p, NUM_TOKENS) for p in prompts()]


def test_bfloat16_passes_the_margin_check(
    tiny_model: Callable[[str], Path],
    check_margin: Callable[..., None],
    make_config: Callable[..., EngineConfig],
    make_driver: Any,
) -> None:
    directory = tiny_model("llama-9-heads-3-kv")
    config = make_config(model=directory, device="cuda", dtype="bfloat16")
    found = make_driver(config).generate(prompts(), NUM_TOKENS)
    for prompt, output in zip(prompts(), found, strict=True):
        check_margin(directory, prompt, output, 0.5)


def test_decodes_are_replayed_and_nothing_else(
    tiny_model: Callable[[str], Path],
    make_config: Callable[..., EngineConfig],
    make_driver: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four rows of different lengths in a graph for four, then for fewer as they end."""
    widths: list[int] = []
    replay = DecodeGraphs.replay

    def spy(self: DecodeGraphs, tokens_3T: torch.Tensor) -> torch.Tensor:
        widths.append(tokens_3T.shape[1])
        return replay(self, tokens_3T)

    monkeypatch.setattr(DecodeGraphs, "replay", spy)
    directory = tiny_model("llama-9-heads-3-kv")
    driver = make_driver(make_config(model=directory, device="cuda"))
    together = driver.generate(prompts(), NUM_TOKENS)
    assert widths == [4] * (NUM_TOKENS - 1)
    three = driver.generate(prompts()[:3], NUM_TOKENS)
    assert widths[NUM_TOKENS - 1 :] == [4] * (NUM_TOKENS - 1)
    assert three == together[:3]


def test_drawn_tokens_equal_those_of_the_cpu(
    tiny_model: Callable[[str], Path],
    make_config: Callable[..., EngineConfig],
    make_driver: Any,
    make_sampling: Callable[..., Any],
) -> None:
    directory = tiny_model("llama-9-heads-3-kv")
    wanted = [make_sampling(temperature=0.9, top_p=0.95, top_k=50, seed=s) for s in range(4)]
    cuda, cpu = (
        make_driver(make_config(model=directory, device=device)).generate(
            prompts(), NUM_TOKENS, wanted
        )
        for device in ("cuda", "cpu")
    )
    assert cuda == cpu


def test_noise_is_that_of_the_cpu() -> None:
    seeds, indices = torch.arange(-5, 5), torch.arange(10)
    found = gumbel(seeds.cuda(), indices.cuda(), 4096).cpu()
    torch.testing.assert_close(found, gumbel(seeds, indices, 4096))


def test_capacity_is_measured(
    tiny_model: Callable[[str], Path], make_config: Callable[..., EngineConfig], make_driver: Any
) -> None:
    config = make_config(model=tiny_model("qwen2-biases"), device="cuda")
    worker = make_driver(config).workers[0]
    total = torch.cuda.get_device_properties(0).total_memory
    block_bytes = 2 * 2 * 4 * 2 * 8 * 4
    assert 0.5 * total < worker.cache_capacity() * block_bytes < 0.9 * total
