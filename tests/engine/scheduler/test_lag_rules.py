"""The rules of the lag against a model: random arrivals, aborts, preemptions, stops and flushes.

The ranks are a real worker with the echo runner, whose tokens are a hash of all that its cache
gives back. So a wrong block, a token that went to another request or a replay that lost one shows
in every later token, and the model predicts all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.core import scheduler_limits
from tpinference_engine.engine.parts import ModelFacts
from tpinference_engine.executor.uni import UniExecutor
from tpinference_engine.request import FinishReason, Request, RequestOutput, SamplingParams
from tpinference_engine.runner.echo import EchoRunner, echo_token
from tpinference_engine.scheduler.limits import SchedulerLimits
from tpinference_engine.scheduler.scheduler import Scheduler
from tpinference_engine.step import MAX_STEP_ID, StepInput

VOCAB_SIZE = 11
EOS = 3
MAX_MODEL_LEN = 30
BLOCK_SIZE = 4

token_ids = st.integers(0, VOCAB_SIZE - 1)


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


class Engine:
    """Scheduler and ranks without the loop between them: a test takes the steps.

    A cache too small for one request of MAX_MODEL_LEN makes requests shorter.
    """

    def __init__(self, *, num_blocks: int, max_num_seqs: int, budget: int) -> None:
        max_model_len = min(MAX_MODEL_LEN, num_blocks * BLOCK_SIZE)
        config = EngineConfig(
            model=Path("none"),
            served_model_name=("echo",),
            device="cpu",
            distributed_executor_backend="uni",
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            scheduling_policy="priority",
        )
        runner = partial(EchoRunner, vocab_size=VOCAB_SIZE)
        self.executor = UniExecutor(config, max_model_len, runner)
        self.executor.start(lambda stage: None)
        facts = ModelFacts(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), max_model_len=max_model_len)
        limits = scheduler_limits(config, facts, num_blocks, max_requests=100)
        self.scheduler = Scheduler(limits)
        self.records: dict[str, Record] = {}
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        expected = expected_output(request, self.scheduler.limits)
        self.records[request.request_id] = Record(request, expected)

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        assert output is not None
        self.take([output])

    def step(self) -> None:
        waiting = self.scheduler.num_waiting
        has_work = self.scheduler.has_work
        step = self.scheduler.schedule()
        assert (step is not None) is has_work
        if step is not None:
            self.num_preemptions += max(0, self.scheduler.num_waiting - waiting)
            self.check_step(step)
            self.run(step)

    def flush(self) -> None:
        step = self.scheduler.flush()
        if step is not None:
            assert not step.forward and step.bucket == 0
            self.run(step)

    def run(self, step: StepInput) -> None:
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
            if record.finish_reason is not FinishReason.ABORT:
                assert record.tokens == record.expected
                is_stop = record.expected[-1] in {EOS, *record.request.params.stop_token_ids}
                if record.finish_reason is FinishReason.STOP:
                    assert is_stop
                else:
                    assert record.finish_reason is FinishReason.LENGTH
        self.scheduler.check_integrity()
        limits = self.scheduler.limits
        assert self.scheduler.num_free_blocks == limits.num_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0


class LagRules(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 9), max_num_seqs=st.integers(1, 4), spare=st.integers(0, 5)
    )
    def begin(self, num_blocks: int, max_num_seqs: int, spare: int) -> None:
        """`spare` tokens of a step are left for prompts when every slot decodes."""
        budget = max_num_seqs + spare
        self.engine = Engine(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget)

    @rule(
        prompt=st.lists(token_ids, min_size=1, max_size=9),
        max_tokens=st.integers(1, 20),
        temperature=st.sampled_from([0.0, 0.7]),
        stop_token_ids=st.lists(token_ids, max_size=1).map(tuple),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt: list[int], max_tokens: int, priority: int, **params: Any) -> None:
        engine = self.engine
        room = engine.scheduler.limits.max_model_len - len(prompt)
        sampling = SamplingParams(max_tokens=min(max_tokens, room), seed=7, **params)
        engine.add(
            Request(
                request_id=str(len(engine.records)),
                prompt_token_ids=tuple(prompt),
                params=sampling,
                priority=priority,
            )
        )

    @precondition(lambda self: self.engine.open_requests())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.engine.open_requests())))

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule()
    def flush(self) -> None:
        self.engine.flush()

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.finish()


TestLagRules = LagRules.TestCase
TestLagRules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def request(name: str, prompt: tuple[int, ...], max_tokens: int, **params: Any) -> Request:
    sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **params}
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, **sampling),
    )


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    def make(**changes: int) -> Engine:
        return Engine(**{"num_blocks": 7, "max_num_seqs": 4, "budget": 8, **changes})

    return make


def test_requests_that_outgrow_the_cache_together_are_preempted_and_end_right(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    for index in range(6):
        engine.add(request(str(index), (index, 1, 2), 15 + index))
    engine.finish()
    assert engine.num_preemptions >= 4


def test_sampled_requests_continue_the_same_after_a_preemption(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    for index in range(6):
        engine.add(request(str(index), (1, 2), 20, temperature=1.0, seed=index))
    engine.finish()
    assert engine.num_preemptions >= 4


def test_one_slot_serves_everybody_in_turn(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_num_seqs=1, budget=1)
    for index in range(5):
        engine.add(request(str(index), (index, index + 1), 4))
    engine.finish()


def test_every_prefix_of_a_life_can_be_aborted(make_engine: Callable[..., Engine]) -> None:
    for num_steps in range(14):
        engine = make_engine(max_num_seqs=2, budget=2)
        engine.add(request("aborted", (1, 2, 3, 4, 5), 6))
        engine.add(request("other", (6, 7, 8), 6))
        for _ in range(num_steps):
            engine.step()
        if "aborted" in engine.open_requests():
            engine.abort("aborted")
        engine.add(request("after", (9,), 6))
        engine.finish()


def test_a_flush_after_every_step_changes_no_token(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    for index in range(4):
        engine.add(request(str(index), (index, 1, 2), 12))
    while engine.scheduler.has_work:
        engine.step()
        engine.flush()
    engine.finish()


def test_step_ids_go_round_under_running_requests(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.scheduler._step_id = MAX_STEP_ID - 4
    for index in range(4):
        engine.add(request(str(index), (index, 1, 2), 12))
    engine.finish()
    assert engine.scheduler._step_id < 100


@pytest.mark.parametrize("seed", range(4))
def test_a_long_walk_of_priorities_through_a_small_cache(
    make_engine: Callable[..., Engine], seed: int
) -> None:
    """Denser than what hypothesis draws: older prompts take blocks from younger decodes."""
    walk = random.Random(seed)
    engine = make_engine(num_blocks=walk.randint(7, 9), budget=walk.randint(4, 6))
    for index in range(150):
        prompt = tuple(walk.randrange(VOCAB_SIZE) for _ in range(walk.randint(1, 16)))
        wanted = request(str(index), prompt, walk.randint(1, 12), seed=index, temperature=1.0)
        engine.add(msgspec.structs.replace(wanted, priority=walk.randint(-3, 3)))
        for _ in range(walk.randint(0, 8)):
            engine.step()
        if walk.random() < 0.2 and engine.open_requests():
            engine.abort(walk.choice(engine.open_requests()))
        engine.scheduler.check_integrity()
        if len(engine.open_requests()) > 12:
            engine.finish()
    engine.finish()
    assert engine.num_preemptions > 10
