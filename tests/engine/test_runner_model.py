"""The model runner: what is batched, cut into chunks or put into used blocks changes no token."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import GroupFailed, InsufficientResources, InvalidConfig
from tpinference_engine.step import BlockAppend, ForwardRow, NewSlot, SampleRow, StepInput
from tpinference_engine.worker import Worker

MODEL = "llama-9-heads-3-kv"
MakeConfig = Callable[..., EngineConfig]


def prompts(*lengths: int) -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(199) for _ in range(length)] for length in lengths]


@pytest.fixture
def config(tiny_model: Callable[[str], Path], make_config: MakeConfig) -> EngineConfig:
    return make_config(model=tiny_model(MODEL))


@pytest.fixture
def driver(config: EngineConfig, make_driver: Any) -> Any:
    return make_driver(config)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 40])
def test_chunked_prompt_gives_the_tokens_of_a_whole_one(driver: Any, chunk: int) -> None:
    several = prompts(41, 5, 16)
    assert driver.generate(several, 8, chunk=chunk) == driver.generate(several, 8)


def test_batch_gives_the_tokens_of_each_alone(driver: Any) -> None:
    several = prompts(30, 2, 17, 1, 9, 64)
    alone = [driver.generate([prompt], 12)[0] for prompt in several]
    assert driver.generate(several, 12) == alone
    assert len(set(map(tuple, alone))) == len(alone)


def test_single_tokens_are_gathered_in_parts_alike(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = prompts(30, 2, 17, 1, 9)
    expected = driver.generate(several, 12)
    monkeypatch.setattr("tpinference_engine.runner.attention.MAX_GATHERED_POSITIONS", 64)
    assert driver.generate(several, 12) == expected


def test_drawn_tokens_depend_on_the_seed_and_not_on_the_batch(
    driver: Any, make_sampling: Callable[..., Any]
) -> None:
    several = prompts(12, 12, 5, 5)
    several[1], several[3] = several[0], several[2]
    wanted = [
        make_sampling(temperature=1.0, seed=1),
        make_sampling(temperature=1.0, seed=2),
        make_sampling(),
        make_sampling(temperature=2.0, top_p=0.9, top_k=20, seed=-5),
    ]
    alone = [
        driver.generate([prompt], 10, [sampling])[0]
        for prompt, sampling in zip(several, wanted, strict=True)
    ]
    assert driver.generate(several, 10, wanted, chunk=5) == alone
    assert len(set(map(tuple, alone))) == 4


def test_ranks_draw_the_tokens_of_one_rank(
    config: EngineConfig,
    driver: Any,
    make_driver: Any,
    make_config: MakeConfig,
    make_sampling: Callable[..., Any],
) -> None:
    several = prompts(20, 3)
    wanted = [make_sampling(temperature=0.8, top_p=0.9, seed=seed) for seed in (1, 2)]
    ranks = make_driver(make_config(model=config.model, tensor_parallel_size=2))
    assert ranks.generate(several, 10, wanted) == driver.generate(several, 10, wanted)


def test_blocks_are_reused_in_the_call_that_frees_them(driver: Any) -> None:
    """Both owners' steps are queued before either ran: only the queue's order keeps them apart."""
    first, second = prompts(16, 15)
    expected = [driver.generate([prompt], 1)[0] for prompt in (first, second)]
    blocks = (9, 4, 7, 1)
    driver.call(_prefill(0, 71, first, blocks))
    both = _prefill(5, 72, second, blocks, free=(0,), sample=(SampleRow(0, 71, 16),))
    answers = [driver.call(both), driver.call(_step(sample=(SampleRow(5, 72, 15),), free=(5,)))]
    assert [[token.token for token in answer[0].tokens] for answer in answers] == expected


def test_replay_continues_with_the_same_draws(
    driver: Any, make_sampling: Callable[..., Any]
) -> None:
    """After a preemption output is sent as prompt; its index, hence its noise, must not move."""
    (prompt,), wanted = prompts(9), make_sampling(temperature=1.5, seed=11)
    expected = driver.generate([prompt], 6, [wanted])[0]
    replay = [*prompt, *expected[:5]]
    new = NewSlot(2, 80, len(prompt), 1.5, 1.0, 0, 11)
    driver.call(_prefill(2, 80, replay, (0, 1, 2, 3), new=new))
    answer = driver.call(_step(sample=(SampleRow(2, 80, len(replay)),), free=(2,)))
    assert answer[0].tokens[0].token == expected[5]


def test_failure_in_the_queue_is_raised_by_the_next_step(driver: Any) -> None:
    """The call that queues the failing pass returns; after it the rank only repeats the error."""
    driver.call(_prefill(0, 90, [10_000], (1,)))
    for _ in range(2):
        with pytest.raises(GroupFailed, match="device queue failed: IndexError"):
            driver.call(_step(sample=(SampleRow(0, 90, 1),)) if _ == 0 else _step())
    with pytest.raises(GroupFailed, match="IndexError"):
        driver.workers[0].idle()


def test_closed_worker_closes_again(config: EngineConfig) -> None:
    worker = Worker(config)
    worker.close()
    worker.initialize(0, 0)
    worker.close()
    worker.close()
    worker.idle()


def test_capacity_is_what_the_cache_budget_holds(
    config: EngineConfig, make_config: MakeConfig
) -> None:
    block_bytes = 2 * 2 * 4 * 3 * 8 * 4  # K and V, layers, block size, KV heads, width, float32

    def capacity(**changes: object) -> int:
        worker = Worker(make_config(model=config.model, **changes))
        worker.initialize(0, 0)
        worker.load_model()
        try:
            return worker.cache_capacity()
        finally:
            worker.close()

    assert capacity() == (1 << 30) // block_bytes
    assert capacity(kv_cache_memory_bytes=100 * block_bytes + 1) == 100
    assert capacity(num_gpu_blocks_override=70) == 70
    with pytest.raises(InsufficientResources, match="63 blocks of 1.50 KiB.*64 blocks.*weights"):
        capacity(kv_cache_memory_bytes=64 * block_bytes - 1)
    assert capacity(kv_cache_memory_bytes=10 * block_bytes, max_model_len=40) == 10


def test_length_beyond_the_model_is_refused(config: EngineConfig, make_config: MakeConfig) -> None:
    worker = Worker(make_config(model=config.model, max_model_len=257))
    with pytest.raises(InvalidConfig, match="max_model_len is 257, the model allows 1 to 256"):
        worker.initialize(0, 0)


def _step(**parts: Any) -> StepInput:
    return StepInput(step_id=0, epoch=0, bucket=64, **parts)


def _prefill(
    slot: int, generation: int, tokens: list[int], blocks: tuple[int, ...], **parts: Any
) -> StepInput:
    new = parts.pop("new", NewSlot(slot, generation, len(tokens), 0.0, 1.0, 0, 0))
    row = ForwardRow(slot, generation, 0, len(tokens), tuple(tokens), True)
    return _step(new=(new,), appends=(BlockAppend(slot, blocks),), forward=(row,), **parts)


def test_rank_whose_peer_is_gone_fails_its_next_step(
    config: EngineConfig, make_driver: Any, make_config: MakeConfig
) -> None:
    driver = make_driver(make_config(model=config.model, tensor_parallel_size=2))
    (prompt,) = prompts(5)
    expected = driver.generate([prompt], 3)
    assert driver.generate([prompt], 3) == expected
    survivor, gone = driver.workers
    gone.close()
    driver.workers = [survivor]
    driver.call(_prefill(0, 99, prompt, (0, 1)))
    with pytest.raises(GroupFailed, match="Connection closed by peer"):
        driver.call(_step(sample=(SampleRow(0, 99, 5),)))
