"""A scheduler that a test plays the ranks of, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tpinference_engine.request import Request, RequestOutput, SamplingParams
from tpinference_engine.scheduler.limits import SchedulerLimits
from tpinference_engine.scheduler.scheduler import Scheduler
from tpinference_engine.step import (
    NO_STEP,
    SampledToken,
    StepInput,
    StepOutput,
    previous_step_id,
)

EOS = 99
EPOCH = 5
REQUEST_FIELDS = {"priority", "cache_salt", "deadline"}


class PlayedScheduler(Scheduler):
    """Vocabulary of 100, end of sequence 99, epoch 5; blocks of 4 tokens, 8 tokens a step."""

    def ask(self, name: str, prompt: tuple[int, ...], max_tokens: int = 8, **params: Any) -> None:
        """Adds a greedy request. `params` are of the request or of its sampling."""
        own = {name: params.pop(name) for name in REQUEST_FIELDS & params.keys()}
        sampling: dict[str, Any] = {"temperature": 0.0, "seed": 1, **params}
        self.add(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens, **sampling),
                **own,
            )
        )

    def next_step(self) -> StepInput:
        step = self.schedule()
        assert step is not None, "nothing to run"
        return step

    def answer(self, step: StepInput, *tokens: int) -> list[RequestOutput]:
        """What ranks that chose `tokens` for the step's SAMPLE rows say to it."""
        sampled = tuple(
            SampledToken(row.slot, row.generation, row.position, token)
            for row, token in zip(step.sample, tokens, strict=True)
        )
        before = previous_step_id(step.step_id) if sampled else NO_STEP
        return self.update(StepOutput(step.step_id, EPOCH, 0, before, 0, 0, sampled))

    def run(self, *tokens: int) -> list[RequestOutput]:
        return self.answer(self.next_step(), *tokens)


@pytest.fixture
def make_scheduler() -> Callable[..., PlayedScheduler]:
    def make(
        seed: int = 0, num_blocks: int = 16, enable_prefix_caching: bool = True, **changes: Any
    ) -> PlayedScheduler:
        """A small cache holds one request of full length, and no second one."""
        base: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 8,
            "max_num_requests": 8,
            "max_model_len": min(32, 4 * num_blocks),
            "block_size": 4,
            "num_blocks": num_blocks,
            "vocab_size": 100,
            "eos_token_ids": (EOS,),
            "scheduling_policy": "priority",
        }
        return PlayedScheduler(
            SchedulerLimits(**{**base, **changes}),
            epoch=EPOCH,
            seed=seed,
            enable_prefix_caching=enable_prefix_caching,
        )

    return make
