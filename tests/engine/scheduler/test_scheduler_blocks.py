"""Who gets blocks, who has to give them back, and what is kept of whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tpinference_engine.request import FinishReason, RequestOutput
from tpinference_engine.step import BlockAppend, ForwardRow, NewSlot, SampleRow

EOS = 99


def token(name: str, *token_ids: int, finish: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=token_ids, finish_reason=finish)


def test_blocks_are_appended_when_a_request_grows_into_them(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (1, 2, 3))
    appends = []
    for tokens in ((), (5,), (5,), (5,), (5,), (5,), (5,)):
        step = scheduler.next_step()
        appends.append(step.appends)
        scheduler.answer(step, *tokens)
    one, two = (BlockAppend(0, (0,)),), (BlockAppend(0, (1,)),)
    assert appends == [one, (), two, (), (), (), (BlockAppend(0, (2,)),)]


def test_the_latest_is_preempted_keeps_its_token_in_flight_and_replays_it(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler(num_blocks=3, enable_prefix_caching=False)
    scheduler.ask("a", (1, 2, 3), max_tokens=9)
    scheduler.ask("b", (4, 5, 6), max_tokens=4)
    scheduler.run()  # Both prompts, one block each.
    scheduler.run(10, 20)  # Position 3.
    step = scheduler.next_step()  # Position 4: a takes the last free block, b has to go.
    assert step.sample == (SampleRow(0, 1, 4), SampleRow(1, 1, 4))
    assert step.forward == (ForwardRow(0, 1, 4, 1, (), True),)
    assert (step.free, step.appends) == ((1,), (BlockAppend(0, (2,)),))
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.answer(step, 11, 21) == [token("a", 11), token("b", 21)]
    scheduler.run(EOS)  # a ends, carrying one step too many.
    step = scheduler.next_step()
    assert step.new == (NewSlot(0, 2, 3, 0.0, 1.0, 0, 1),), "of the user's prompt alone"
    assert step.forward == (ForwardRow(0, 2, 0, 5, (4, 5, 6, 20, 21), True),)
    assert scheduler.answer(step, 12) == []
    assert scheduler.run(22) == [token("b", 22)]
    scheduler.check_integrity()


def test_a_preempted_request_may_end_by_its_token_in_flight(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler(num_blocks=3)
    scheduler.ask("a", (1, 2, 3), max_tokens=9)
    scheduler.ask("b", (4, 5, 6), max_tokens=9)
    scheduler.run()
    scheduler.run(10, 20)
    assert scheduler.run(11, EOS) == [
        token("a", 11),
        token("b", EOS, finish=FinishReason.STOP),
    ]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    scheduler.check_integrity()


def test_a_prompt_takes_blocks_from_a_decode_of_less_priority_and_its_row_with_them(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5, num_blocks=6)
    scheduler.ask("late", (2,) * 5, max_tokens=15, priority=1)
    scheduler.run()
    scheduler.ask("early", (1,) * 13, max_tokens=2)
    scheduler._limits = replace(scheduler.limits, max_num_batched_tokens=2)
    for chosen in range(8):
        scheduler.run(chosen)
    assert scheduler.num_free_blocks == 0
    # The decode was chosen first, then the prompt's next token needs a block of its own.
    step = scheduler.next_step()
    assert step.forward == (ForwardRow(1, 1, 8, 1, (1,), False),)
    assert [append.slot for append in step.appends] == [1]
    assert (step.sample, step.free) == ((SampleRow(0, 1, 13),), (0,))
    assert scheduler.answer(step, 8) == [token("late", 8)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    scheduler.check_integrity()


def test_nobody_is_admitted_by_the_step_that_preempts(make_scheduler: Callable[..., Any]) -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=16)
    scheduler.ask("a", (3,) * 6, max_tokens=18)
    scheduler.ask("latest", (4,) * 5, max_tokens=9, priority=1)
    scheduler.run()
    for chosen in range(6):
        scheduler.run(chosen, chosen)
    assert scheduler.num_free_blocks == 0
    # It would fit into what the latest gives up now; that is for the next step.
    scheduler.ask("next", (5, 6), max_tokens=2)
    step = scheduler.next_step()
    assert (step.free, step.new, len(step.forward)) == ((1,), (), 1)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    scheduler.answer(step, 7, 7)
    assert scheduler.next_step().new == (NewSlot(1, 2, 2, 0.0, 1.0, 0, 1),)


def test_blocks_that_a_prompt_still_needs_are_not_given_to_an_arrival(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=16)
    scheduler.ask("a", (1,) * 12, max_tokens=2)
    scheduler.ask("b", (2,), max_tokens=2)
    step = scheduler.next_step()
    assert scheduler.num_free_blocks == 1
    assert [row.num_tokens for row in step.forward] == [12]


def test_a_waiting_request_that_does_not_fit_is_not_overtaken(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=16)
    scheduler.ask("a", (1,) * 7, max_tokens=2)
    scheduler.ask("large", (2,) * 9, max_tokens=2)
    scheduler.ask("small", (3,), max_tokens=2)
    assert len(scheduler.next_step().forward) == 1
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_a_request_of_full_length_may_take_the_whole_cache(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler(num_blocks=2)
    assert scheduler.limits.max_model_len == 8
    scheduler.ask("a", (1,) * 5, max_tokens=3)
    outputs = scheduler.run()
    for chosen in (10, 11, 12):
        outputs += scheduler.run(chosen)
    assert outputs[-1] == token("a", 12, finish=FinishReason.LENGTH)
    assert scheduler.schedule() is None


def test_a_preempted_request_keeps_the_seed_it_was_given(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler(num_blocks=3)
    scheduler.ask("a", (1, 2, 3), max_tokens=9)
    scheduler.ask("b", (4, 5, 6), max_tokens=4, seed=None)
    first = scheduler.next_step()
    scheduler.answer(first)
    scheduler.run(10, 20)
    scheduler.run(11, 21)
    scheduler.run(EOS)
    assert scheduler.next_step().new[0].seed == first.new[1].seed
