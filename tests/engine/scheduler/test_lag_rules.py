"""The rules of the lag against a model: random arrivals, aborts, deadlines, preemptions, shared
prefixes, stops, flushes and failures of the group.

The ranks are a real worker with the echo runner, whose tokens are a hash of all that its cache
gives back. So a wrong block, a token that went to another request or a replay that lost one shows
in every later token, and the model predicts all of them. It also refuses a write to a block that
two have, and a prefix that is not a request's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tpinference_engine.request import Request, SamplingParams
from tpinference_engine.step import MAX_STEP_ID

VOCAB_SIZE = 11

SHARED = tuple(7 * i * i % VOCAB_SIZE for i in range(12)), tuple(5 * i % 9 for i in range(12))
"""Prompts begin alike, up to some length."""

MakeEngine = Callable[..., Any]

token_ids = st.integers(0, VOCAB_SIZE - 1)


class LagRules(RuleBasedStateMachine):
    make_engine: MakeEngine

    @initialize(
        num_blocks=st.integers(3, 9), max_num_seqs=st.integers(1, 4), spare=st.integers(0, 5)
    )
    def begin(self, num_blocks: int, max_num_seqs: int, spare: int) -> None:
        """`spare` tokens of a step are left for prompts when every slot decodes."""
        budget = max_num_seqs + spare
        self.now = 0
        self.engine = self.make_engine(
            num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget
        )

    @rule(
        prompt=st.lists(token_ids, min_size=1, max_size=9),
        shared=st.one_of(st.just(()), st.sampled_from(SHARED)),
        num_shared=st.integers(0, 12),
        max_tokens=st.integers(1, 20),
        more=st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 0.7]),
                "stop_token_ids": st.lists(token_ids, max_size=1).map(tuple),
                "ignore_eos": st.booleans(),
            }
        ),
        extra=st.fixed_dictionaries(
            {
                "priority": st.integers(-1, 1),
                "cache_salt": st.sampled_from([None, None, "salt"]),
                "deadline": st.one_of(st.none(), st.integers(1, 50)),
            }
        ),
    )
    def add(
        self,
        prompt: list[int],
        shared: tuple[int, ...],
        num_shared: int,
        max_tokens: int,
        more: dict[str, Any],
        extra: dict[str, Any],
    ) -> None:
        self.ask((*shared[:num_shared], *prompt), max_tokens, more, extra)

    @precondition(lambda self: self.engine.records)
    @rule(data=st.data(), more=st.lists(token_ids, max_size=3), max_tokens=st.integers(1, 9))
    def go_on(self, data: st.DataObject, more: list[int], max_tokens: int) -> None:
        """A next turn: what was asked and answered until now, and a little more."""
        before = data.draw(st.sampled_from(list(self.engine.records.values())))
        prompt = (*before.request.prompt_token_ids, *before.tokens, *more)
        salt = {"cache_salt": before.request.cache_salt}
        self.ask(prompt, max_tokens, {"temperature": 0.0}, salt)

    def ask(
        self, prompt: tuple[int, ...], max_tokens: int, more: dict[str, Any], extra: dict[str, Any]
    ) -> None:
        engine = self.engine
        room = engine.scheduler.limits.max_model_len
        prompt = prompt[: room - 1]
        sampling = SamplingParams(max_tokens=min(max_tokens, room - len(prompt)), seed=7, **more)
        engine.add(
            Request(
                request_id=str(len(engine.records)),
                prompt_token_ids=prompt,
                params=sampling,
                **extra,
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

    @rule(seconds=st.integers(1, 9))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.engine.expire(self.now)

    @precondition(lambda self: self.engine.records)
    @rule()
    def fail(self) -> None:
        self.engine.fail()

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.finish()


def test_the_rules_hold_whatever_happens(make_engine: MakeEngine) -> None:
    rules = type("Rules", (LagRules,), {"make_engine": staticmethod(make_engine)})
    run_state_machine_as_test(
        rules,
        settings=settings(max_examples=100, stateful_step_count=50, deadline=None),
    )


def request(name: str, prompt: tuple[int, ...], max_tokens: int, **params: Any) -> Request:
    sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **params}
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, **sampling),
    )


def test_requests_that_outgrow_the_cache_together_are_preempted_and_end_right(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    for index in range(6):
        engine.add(request(str(index), (index, 1, 2), 15 + index))
    engine.finish()
    assert engine.num_preemptions >= 4


def test_sampled_requests_continue_the_same_after_a_preemption(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    for index in range(6):
        engine.add(request(str(index), (1, 2), 20, temperature=1.0, seed=index))
    engine.finish()
    assert engine.num_preemptions >= 4


def test_one_slot_serves_everybody_in_turn(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1, budget=1)
    for index in range(5):
        engine.add(request(str(index), (index, index + 1), 4))
    engine.finish()


def test_every_prefix_of_a_life_can_be_aborted(make_engine: MakeEngine) -> None:
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


def test_a_flush_after_every_step_changes_no_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for index in range(4):
        engine.add(request(str(index), (index, 1, 2), 12))
    while engine.scheduler.has_work:
        engine.step()
        engine.flush()
    engine.finish()


def test_step_ids_go_round_under_running_requests(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.scheduler._step_id = MAX_STEP_ID - 4
    for index in range(4):
        engine.add(request(str(index), (index, 1, 2), 12))
    engine.finish()
    assert engine.scheduler._step_id < 100


@pytest.mark.parametrize("seed", range(4))
def test_a_long_walk_of_priorities_through_a_small_cache(
    make_engine: MakeEngine, seed: int
) -> None:
    """Denser than what hypothesis draws: older prompts take blocks from younger decodes, and many
    begin alike."""
    walk = random.Random(seed)
    engine = make_engine(num_blocks=walk.randint(7, 9), budget=walk.randint(4, 6))
    for index in range(150):
        own = tuple(walk.randrange(VOCAB_SIZE) for _ in range(walk.randint(1, 8)))
        prompt = (*walk.choice(SHARED)[: walk.choice([0, 8, 12])], *own)[:16]
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
    assert engine.num_hits > 200
