"""The real model: parity with transformers at one and two ranks, and the margin check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpinference_engine.config import EngineConfig

pytestmark = pytest.mark.model

NUM_TOKENS = 64
# In bfloat16 a logit of 16 to 32 has a spacing of 0.125; 0.21 is the most that was seen.
EPSILON = 0.5
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
    "1, 2, 3, 4, 5, 6,",
    "Q: What is the boiling point of water at sea level?\nA:",
    "Wikipedia is a free online encyclopedia that is written and maintained by a community of "
    "volunteers. Its articles are",
    "x",
    "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def test_64_tokens_of_8_batched_prompts_equal_transformers(
    smollm2_dir: Path,
    prompts: list[list[int]],
    reference: Callable[[Path], Any],
    make_config: Callable[..., EngineConfig],
    make_driver: Any,
) -> None:
    driver = make_driver(make_config(model=smollm2_dir, block_size=16))
    found = driver.generate(prompts, NUM_TOKENS)
    assert [len(output) for output in found] == [NUM_TOKENS] * len(prompts)
    for prompt, output in zip(prompts, found, strict=True):
        assert output == reference(smollm2_dir).greedy_after(prompt, output)
    assert found[0][:16] == reference(smollm2_dir).generate(prompts[0], 16)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_with_transformers(
    size: int,
    smollm2_dir: Path,
    prompts: list[list[int]],
    reference: Callable[[Path], Any],
    make_config: Callable[..., EngineConfig],
    make_driver: Any,
) -> None:
    config = make_config(model=smollm2_dir, tensor_parallel_size=size, block_size=16)
    found = make_driver(config).generate(prompts[:3], 16)
    assert found == [reference(smollm2_dir).generate(p, 16) for p in prompts[:3]]


@pytest.mark.parametrize("size", [1, 2])
def test_bfloat16_passes_the_margin_check(
    size: int,
    smollm2_dir: Path,
    prompts: list[list[int]],
    check_margin: Callable[..., None],
    make_config: Callable[..., EngineConfig],
    make_driver: Any,
) -> None:
    config = make_config(model=smollm2_dir, dtype="auto", tensor_parallel_size=size, block_size=16)
    num_tokens = NUM_TOKENS if size == 1 else 16
    for prompt, output in zip(
        prompts, make_driver(config).generate(prompts, num_tokens), strict=True
    ):
        check_margin(smollm2_dir, prompt, output, EPSILON)
