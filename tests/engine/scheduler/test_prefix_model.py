"""A small real model in float32: caching, sharing and preemption change none of its tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.core import scheduler_limits
from tpinference_engine.engine.parts import ModelFacts
from tpinference_engine.executor.uni import UniExecutor
from tpinference_engine.request import FinishReason, Request, SamplingParams
from tpinference_engine.scheduler.scheduler import Scheduler
from tpinference_engine.scheduler.stats import SchedulerStats

MODEL = "llama-9-heads-3-kv"
MAX_MODEL_LEN = 96
NUM_TOKENS = 24
Prompt = tuple[int, ...]


def conversations() -> list[Prompt]:
    """Prompts that begin alike: nothing, a part, or all of two long beginnings in common."""
    source = random.Random(5)
    beginnings = [tuple(source.randrange(199) for _ in range(40)) for _ in range(2)]
    prompts = []
    for index in range(12):
        own = tuple(source.randrange(199) for _ in range(source.randint(1, 12)))
        prompts.append((*beginnings[index % 2][: source.choice([0, 16, 23, 40])], *own))
    # Blocks that are all there, but behind others.
    mixed = (*beginnings[1][:8], *beginnings[0][8:])
    return [*prompts, beginnings[0], beginnings[0], mixed, prompts[3]]


class Serving:
    """A scheduler and the model under uni; requests come two steps after each other."""

    def __init__(self, config: EngineConfig) -> None:
        self._executor = UniExecutor(config, MAX_MODEL_LEN)
        self._executor.start(lambda stage: None)
        facts = ModelFacts(vocab_size=199, eos_token_ids=(), max_model_len=MAX_MODEL_LEN)
        limits = scheduler_limits(config, facts, self._executor.num_blocks, max_requests=100)
        self._scheduler = Scheduler(
            limits, epoch=config.epoch, enable_prefix_caching=config.enable_prefix_caching
        )
        self._tokens: dict[str, list[int]] = {}

    def generate(self, prompts: Sequence[Prompt], temperature: float) -> list[list[int]]:
        names = [f"{len(self._tokens) + index}" for index in range(len(prompts))]
        for index, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=index)
            request = Request(request_id=name, prompt_token_ids=prompt, params=params)
            self._tokens[name] = []
            self._scheduler.add(request)
            self._step()
            self._step()
        while self._scheduler.has_work:
            self._step()
        self._scheduler.check_integrity()
        return [self._tokens[name] for name in names]

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    def close(self) -> None:
        self._executor.shutdown()

    def _step(self) -> None:
        step = self._scheduler.schedule()
        if step is None:
            return
        self._executor.submit(step)
        for output in self._scheduler.update(self._executor.collect()):
            assert output.finish_reason in (None, FinishReason.LENGTH), output
            self._tokens[output.request_id] += output.token_ids


@pytest.fixture
def serve(
    tiny_model: Callable[[str], Path],
    make_config: Callable[..., EngineConfig],
    request: pytest.FixtureRequest,
) -> Callable[..., Serving]:
    def make(**changes: Any) -> Serving:
        base: dict[str, Any] = {
            "model": tiny_model(MODEL),
            "distributed_executor_backend": "uni",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 32,
            "num_gpu_blocks_override": 400,
        }
        serving = Serving(make_config(**{**base, **changes}))
        request.addfinalizer(serving.close)
        return serving

    return make


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_tokens_are_those_of_an_engine_without_a_prefix_cache(
    serve: Callable[..., Serving], temperature: float
) -> None:
    prompts = conversations()
    plain = serve(enable_prefix_caching=False)
    expected = plain.generate(prompts, temperature)
    assert [len(tokens) for tokens in expected] == [NUM_TOKENS] * len(prompts)

    roomy = serve()
    assert roomy.generate(prompts, temperature) == expected
    first = roomy.stats.prefix_cache_hits
    assert first > 150
    # All of it is there now, but for the last token of each.
    assert roomy.generate(prompts, temperature) == expected
    found = roomy.stats.prefix_cache_hits - first
    assert found == sum((len(prompt) - 1) // 4 * 4 for prompt in prompts)

    # 30 blocks of 4: hardly two requests at their end, so prefixes are lost and requests preempted.
    tight = serve(num_gpu_blocks_override=30)
    assert tight.generate(prompts, temperature) == expected
    assert tight.stats.num_preemptions > 3
    assert tight.stats.prefix_cache_hits > 0
    tight_plain = serve(num_gpu_blocks_override=30, enable_prefix_caching=False)
    assert tight_plain.generate(prompts, temperature) == expected


def test_a_next_turn_continues_what_the_last_one_answered(serve: Callable[..., Serving]) -> None:
    """Blocks of output serve as a prompt's: the tokens are those of one long answer."""
    first = conversations()[:4]
    plain, shared = serve(enable_prefix_caching=False), serve()
    for serving in (plain, shared):
        answers = serving.generate(first, 0.0)
        turns = [(*p, *a, 5) for p, a in zip(first, answers, strict=True) if len(p) < 40]
        assert turns
        second = serving.generate(turns, 0.0)
        if serving is plain:
            expected = second
    assert second == expected
    assert shared.stats.prefix_cache_hits >= sum(len(turn) - 5 for turn in turns) // 4 * 4 - 16
