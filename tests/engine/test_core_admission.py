"""What the core takes in and lets go beside its steps: the canary's place, and deadlines."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.core import EngineCore
from tpinference_engine.engine.messages import (
    AddRequest,
    FromCore,
    Progress,
    RunCanary,
    StopCore,
    ToCore,
)
from tpinference_engine.engine.parts import EngineParts, ModelFacts
from tpinference_engine.executor.uni import UniExecutor
from tpinference_engine.request import FinishReason, Request, RequestOutput, SamplingParams
from tpinference_engine.runner.echo import EchoRunner
from tpinference_engine.step import StepInput

MAX_REQUESTS = 3


class Core:
    """A core in this thread: what it hears next is put by what it says and does."""

    def __init__(self, config: EngineConfig) -> None:
        self.inbox: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
        self.finished: dict[str, RequestOutput] = {}
        self.free_blocks: list[int] = []
        self.queued_s: list[float] = []
        self.on_step: Callable[[int], None] = lambda number: None
        self._num_steps = 0
        core = self

        class Executor(UniExecutor):
            def submit(self, step: StepInput) -> None:
                super().submit(step)
                core._num_steps += 1
                core.on_step(core._num_steps)

        executor = Executor(config, 64, EchoRunner)
        facts = ModelFacts(vocab_size=512, eos_token_ids=(), max_model_len=64)
        parts = EngineParts(executor=executor, model=facts)
        self._core = EngineCore(
            config,
            lambda _: parts,
            max_requests=MAX_REQUESTS,
            inbox=self.inbox,
            emit=self._hear,
        )
        self._wanted: set[str] = set()

    def ask(self, name: str, **changes: Any) -> None:
        self._wanted.add(name)
        self.inbox.put(
            AddRequest(
                Request(
                    request_id=name,
                    prompt_token_ids=(1, 2, 3, 4, 5),
                    params=SamplingParams(max_tokens=40, temperature=0.0),
                    **changes,
                )
            )
        )

    def run(self) -> None:
        assert self._core.run()

    def _hear(self, message: FromCore) -> None:
        if isinstance(message, Progress):
            self.free_blocks.append(message.cache.free_blocks)
            self.queued_s += message.step.queued_s if message.step else ()
            self.finished |= {o.request_id: o for o in message.outputs if o.finish_reason}
            if self._wanted and self.finished.keys() >= self._wanted:
                self.inbox.put(StopCore())


@pytest.fixture
def core(make_config: Callable[..., EngineConfig]) -> Core:
    return Core(make_config(distributed_executor_backend="uni", max_num_batched_tokens=16))


def test_the_canary_takes_no_place_from_the_requests_that_may_be_open(core: Core) -> None:
    """The API server counts its own requests alone, and so never hears of one too many."""

    def arrive(number: int) -> None:
        if number == 1:
            for index in range(MAX_REQUESTS):
                core.ask(str(index))

    core.on_step = arrive
    core.inbox.put(RunCanary(1))
    core.run()
    reasons = {name: output.finish_reason for name, output in core.finished.items()}
    assert reasons == dict.fromkeys("012", FinishReason.LENGTH), core.finished


def test_a_request_past_its_deadline_ends_and_its_blocks_come_back(core: Core) -> None:
    """Seen between two steps, also in the middle of an answer; others go on."""
    deadline = time.monotonic() + 0.2

    def wait(number: int) -> None:
        while number == 5 and time.monotonic() <= deadline:
            time.sleep(0.01)

    core.on_step = wait
    core.ask("late", deadline=deadline)
    core.ask("patient", deadline=time.monotonic() + 600)
    core.run()
    late, patient = core.finished["late"], core.finished["patient"]
    assert (late.finish_reason, late.token_ids) == (FinishReason.DEADLINE, ())
    assert late.error is not None and "deadline passed" in late.error
    assert patient.finish_reason is FinishReason.LENGTH
    assert core.free_blocks[-1] == core.free_blocks[0]


def test_a_request_that_comes_too_late_is_never_run(core: Core) -> None:
    core.ask("late", deadline=time.monotonic() - 1)
    core.on_step = lambda number: pytest.fail("nothing to run")
    core.run()
    assert core.finished["late"].finish_reason is FinishReason.DEADLINE


def test_the_time_in_the_queue_is_told_once_of_each_request_that_is_run(core: Core) -> None:
    """Not of the canary, nor of one whose deadline passed in the queue."""
    core.ask("late", deadline=time.monotonic() - 1)
    core.inbox.put(RunCanary(1))
    for index in range(MAX_REQUESTS - 1):
        core.ask(str(index))
    began = time.monotonic()
    core.run()
    assert len(core.queued_s) == MAX_REQUESTS - 1
    assert all(0 <= queued_s < time.monotonic() - began for queued_s in core.queued_s)
