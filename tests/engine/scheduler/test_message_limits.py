"""The largest step that admission lets happen fills its channel to the last word, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tpinference_engine.errors import PromptTooLong
from tpinference_engine.step import (
    SampledToken,
    StepInput,
    StepLimits,
    StepOutput,
    encode_input,
    encode_output,
)

MAX_NUM_SEQS = 3
MAX_MODEL_LEN = 16
BLOCK_SIZE = 4
BUDGET = 9
LIMITS = StepLimits(MAX_NUM_SEQS, BUDGET, MAX_MODEL_LEN // BLOCK_SIZE)
MakeScheduler = Callable[..., Any]


def prompt(number: int, length: int = MAX_MODEL_LEN - 1) -> tuple[int, ...]:
    """With one token of output it is as long as the model allows."""
    return tuple(range(number, number + length))


@pytest.fixture
def scheduler(make_scheduler: MakeScheduler) -> Any:
    """On the point of its largest step: all slots change hands, with logits pending in each, and
    the cache holds three of the four blocks of each prompt that is to come."""
    made = make_scheduler(
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=BUDGET,
        num_blocks=32,
    )
    for number in range(MAX_NUM_SEQS):
        made.ask(f"before {number}", prompt(20 * number), max_tokens=1)
    while (step := made.schedule()) is not None:
        made.answer(step, *(0 for _ in step.sample))
    for number in range(MAX_NUM_SEQS):
        made.ask(f"open {number}", (90 + number,), max_tokens=5)
    made.run()
    for number in range(MAX_NUM_SEQS):
        made.abort(f"open {number}")
    return made


def ask_all(scheduler: Any, **params: Any) -> None:
    for number in range(MAX_NUM_SEQS):
        scheduler.ask(f"now {number}", prompt(20 * number), max_tokens=1, **params)


def check_largest(step: StepInput) -> None:
    assert [len(part) for part in (step.sample, step.free, step.new, step.forward)] == [3] * 4
    assert [len(append.blocks) for append in step.appends] == [LIMITS.max_blocks_per_slot] * 3
    assert sum(len(row.tokens) for row in step.forward) == BUDGET
    payload = encode_input(step)
    assert len(payload) == LIMITS.max_input_bytes
    LIMITS.check_input(payload)


def test_slots_that_get_all_their_blocks_at_once_fill_the_channel_exactly(scheduler: Any) -> None:
    ask_all(scheduler)
    step = scheduler.next_step()
    check_largest(step)
    assert {row.start for row in step.forward} == {12}
    assert scheduler.num_waiting == 0


def test_one_request_more_waits(scheduler: Any) -> None:
    ask_all(scheduler)
    scheduler.ask("one more", (1,), max_tokens=1)
    check_largest(scheduler.next_step())
    assert scheduler.num_waiting == 1


def test_one_token_more_is_refused_at_the_door(scheduler: Any) -> None:
    with pytest.raises(PromptTooLong, match="16 tokens and max_tokens is 1, together 17"):
        scheduler.ask("too long", prompt(0, MAX_MODEL_LEN), max_tokens=1)
    ask_all(scheduler)
    check_largest(scheduler.next_step())


def test_one_token_more_to_compute_waits_for_the_next_step(scheduler: Any) -> None:
    """A prompt that is not cached takes all that is left of the budget, and only that."""
    for number in range(2):
        scheduler.ask(f"now {number}", prompt(20 * number), max_tokens=1)
    scheduler.ask("other", prompt(70), max_tokens=1)
    step = scheduler.next_step()
    assert [row.num_tokens for row in step.forward] == [3, 3, 3]
    assert len(encode_input(step)) == LIMITS.max_input_bytes - 4 * 3, "three blocks less"


@pytest.mark.parametrize("num_stops", [0, 1, 100])
def test_a_stop_set_of_any_size_stays_with_the_scheduler(scheduler: Any, num_stops: int) -> None:
    ask_all(scheduler, stop_token_ids=tuple(range(num_stops)))
    check_largest(scheduler.next_step())


def test_the_largest_answer_fits_exactly(scheduler: Any) -> None:
    ask_all(scheduler)
    scheduler.run(0, 0, 0)
    step = scheduler.next_step()
    tokens = tuple(SampledToken(row.slot, row.generation, row.position, 0) for row in step.sample)
    answer = StepOutput(step.step_id, step.epoch, 0, step.step_id - 1, 0, 0, tokens)
    assert len(tokens) == MAX_NUM_SEQS
    assert len(encode_output(answer)) == LIMITS.max_output_bytes
