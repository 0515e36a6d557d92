"""A scheduler that a test plays the ranks of, step by step; and one with ranks that echo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.core import scheduler_limits
from tpinference_engine.engine.parts import ModelFacts
from tpinference_engine.executor.uni import UniExecutor
from tpinference_engine.request import FinishReason, Request, RequestOutput, SamplingParams
from tpinference_engine.runner.echo import EchoRunner, echo_token
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
VOCAB_SIZE = 11
BLOCK_SIZE = 4
MAX_MODEL_LEN = 30
"""Of the echoing engine, whose end of sequence is 3."""
ECHO_EOS = 3

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


def expected_output(request: Request, limits: SchedulerLimits) -> list[int]:
    """All tokens of a request that is left alone."""
    params, prompt = request.params, request.prompt_token_ids
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_token_ids)}
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens:
        tokens.append(
            echo_token(
                tokens,
                prompt_length=len(prompt),
                seed=params.seed or 0 if params.temperature else 0,
                vocab_size=VOCAB_SIZE,
            )
        )
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


@dataclass
class Record:
    request: Request
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Salts:
    """Who wrote which block, read off the messages alone: a prefix is of the request's own salt."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}
        self._writers: dict[int, str | None] = {}

    def check(self, step: StepInput, salts: dict[int, str | None]) -> None:
        for slot in step.free:
            del self._tables[slot]
        self._tables |= {new.slot: [] for new in step.new}
        for append in step.appends:
            self._tables[append.slot] += append.blocks
        new = {new.slot for new in step.new}
        for row in step.forward:
            table, salt = self._tables[row.slot], salts[row.slot]
            found = table[: row.start // BLOCK_SIZE] if row.slot in new else []
            assert all(self._writers[block] == salt for block in found), (row, self._writers)
        for row in step.forward:
            end = row.start + row.num_tokens
            for block in self._tables[row.slot][row.start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]:
                self._writers[block] = salts[row.slot]


class Engine:
    """Scheduler and ranks without the loop between them: a test takes the steps.

    A cache too small for one request of MAX_MODEL_LEN makes requests shorter.
    """

    def __init__(self, *, num_blocks: int, max_num_seqs: int, budget: int) -> None:
        self._config = EngineConfig(
            model=Path("none"),
            served_model_name=("echo",),
            device="cpu",
            distributed_executor_backend="uni",
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=min(MAX_MODEL_LEN, num_blocks * BLOCK_SIZE),
            scheduling_policy="priority",
        )
        self.records: dict[str, Record] = {}
        self.num_preemptions = self.num_hits = 0
        self._start()

    def _start(self) -> None:
        config = self._config
        max_model_len, num_blocks = config.max_model_len, config.num_gpu_blocks_override
        assert max_model_len is not None and num_blocks is not None
        runner = partial(EchoRunner, vocab_size=VOCAB_SIZE)
        self.executor = UniExecutor(config, max_model_len, runner)
        self.executor.start(lambda stage: None)
        facts = ModelFacts(
            vocab_size=VOCAB_SIZE, eos_token_ids=(ECHO_EOS,), max_model_len=max_model_len
        )
        limits = scheduler_limits(config, facts, num_blocks, max_requests=100)
        self.scheduler = Scheduler(limits, epoch=config.epoch)
        self.salts = Salts()

    def fail(self) -> None:
        """The group is lost with its cache; another one, of the next epoch, begins with nothing."""
        is_open = self.open_requests()
        outputs = self.scheduler.drop_all(FinishReason.ERROR, "lost")
        assert {output.request_id for output in outputs} == set(is_open)
        self.take(outputs)
        assert self.scheduler.num_free_blocks == self.scheduler.limits.num_blocks
        self.scheduler.check_integrity()
        self.executor.shutdown()
        self._config = replace(self._config, epoch=self._config.epoch + 1)
        self._start()

    def expire(self, now: int) -> None:
        late = {
            name
            for name in self.open_requests()
            if (deadline := self.records[name].request.deadline) is not None and deadline <= now
        }
        outputs = self.scheduler.expire(now)
        assert {output.request_id for output in outputs} == late
        self.take(outputs)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        expected = expected_output(request, self.scheduler.limits)
        self.records[request.request_id] = Record(request, expected)

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        assert output is not None
        self.take([output])

    def step(self) -> None:
        has_work, before = self.scheduler.has_work, self.scheduler.stats
        step = self.scheduler.schedule()
        assert (step is not None) is has_work
        if step is not None:
            stats = self.scheduler.stats
            self.num_preemptions += stats.num_preemptions - before.num_preemptions
            self.num_hits += stats.prefix_cache_hits - before.prefix_cache_hits
            self.check_step(step)
            self.run(step)

    def flush(self) -> None:
        step = self.scheduler.flush()
        if step is not None:
            assert not step.forward and step.bucket == 0
            self.run(step)

    def run(self, step: StepInput) -> None:
        running = {
            s.slot: s.request.cache_salt for s in self.scheduler._running if s.slot is not None
        }
        self.salts.check(step, running)
        self.executor.submit(step)
        self.take(self.scheduler.update(self.executor.collect()))

    def check_step(self, step: StepInput) -> None:
        """The worker refuses a step that breaks its protocol; these it can't see."""
        limits = self.scheduler.limits
        assert sum(row.num_tokens for row in step.forward) <= limits.max_num_batched_tokens
        assert step.forward or step.sample, "a call for nothing"
        singles = [row.num_tokens == 1 for row in step.forward]
        assert singles == sorted(singles, reverse=True) or step.new, "decodes go first"

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            record = self.records[output.request_id]
            assert record.finish_reason is None, f"{output} after the end"
            record.tokens += output.token_ids
            record.finish_reason = output.finish_reason
            assert record.tokens == record.expected[: len(record.tokens)]

    def open_requests(self) -> list[str]:
        return [name for name, r in self.records.items() if r.finish_reason is None]

    def finish(self) -> None:
        """Runs all to the end; then every request has exactly its tokens and nothing leaks."""
        most = 3 * sum(len(r.request.prompt_token_ids) + 30 for r in self.records.values()) + 9
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"no end after {most} steps"
        for record in self.records.values():
            if record.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert record.tokens == record.expected
                is_stop = record.expected[-1] in {ECHO_EOS, *record.request.params.stop_token_ids}
                if record.finish_reason is FinishReason.STOP:
                    assert is_stop
                else:
                    assert record.finish_reason is FinishReason.LENGTH
        self.scheduler.check_integrity()
        limits = self.scheduler.limits
        assert self.scheduler.num_free_blocks == limits.num_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    def make(**changes: int) -> Engine:
        return Engine(**{"num_blocks": 7, "max_num_seqs": 4, "budget": 8, **changes})

    return make
