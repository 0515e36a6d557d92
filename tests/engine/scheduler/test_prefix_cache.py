"""Exact sequences of steps with a prefix cache: who finds what, from when on, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tpinference_engine.request import FinishReason, RequestOutput
from tpinference_engine.scheduler.stats import SchedulerStats
from tpinference_engine.step import BlockAppend, ForwardRow, NewSlot, SampleRow, StepInput

EOS = 99
MakeScheduler = Callable[..., Any]

SHARED = (1, 2, 3, 4, 5, 6, 7, 8)
"""Two blocks of 4."""


def hits(scheduler: Any) -> tuple[int, int]:
    stats: SchedulerStats = scheduler.stats
    return stats.prefix_cache_queries, stats.prefix_cache_hits


def compute(scheduler: Any, name: str, prompt: tuple[int, ...], **params: Any) -> StepInput:
    """Runs a request of one token from its prompt to its end; the step that began it."""
    scheduler.ask(name, prompt, max_tokens=1, **params)
    first: StepInput = scheduler.next_step()
    step = first
    while not scheduler.answer(step, *(EOS for _ in step.sample)):
        step = scheduler.next_step()
    return first


def test_a_later_request_begins_with_the_blocks_of_an_earlier_one(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (*SHARED, 9), max_tokens=4)
    scheduler.answer(scheduler.next_step())
    scheduler.ask("b", (*SHARED, 20, 21), max_tokens=4)
    step = scheduler.next_step()
    # In the step after the one that writes them; a still has its last prompt token to compute.
    assert step.appends == (BlockAppend(0, (2,)), BlockAppend(1, (0, 1, 3)))
    assert step.forward == (
        ForwardRow(0, 1, 8, 1, (9,), True),
        ForwardRow(1, 1, 8, 2, (20, 21), True),
    )
    assert step.new == (NewSlot(1, 1, 10, 0.0, 1.0, 0, 1),), "of its whole prompt"
    scheduler.answer(step)
    assert scheduler.next_step().sample == (SampleRow(0, 1, 9), SampleRow(1, 1, 10))
    assert hits(scheduler) == (9 + 10, 8)
    scheduler.check_integrity()


def test_a_prefix_is_not_found_in_the_step_that_computes_it(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.ask("a", SHARED[:5])
    scheduler.ask("b", SHARED[:5])
    step = scheduler.next_step()
    assert step.appends == (BlockAppend(0, (0, 1)), BlockAppend(1, (2, 3)))
    assert [row.num_tokens for row in step.forward] == [5, 5]
    scheduler.answer(step)
    # Of the two with the same content the first is the one that is found; both keep theirs.
    scheduler.ask("c", SHARED[:5])
    assert scheduler.next_step().appends == (BlockAppend(2, (0, 4)),)
    scheduler.check_integrity()


def test_of_a_prompt_that_is_cached_wholly_the_last_token_is_computed(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler()
    compute(scheduler, "a", SHARED)
    step = compute(scheduler, "b", SHARED)
    # Whole blocks only: the one that is to be written is nobody else's.
    assert step.appends == (BlockAppend(0, (0, 2)),)
    assert step.forward == (ForwardRow(0, 2, 4, 4, SHARED[4:], True),)
    step = compute(scheduler, "c", (*SHARED, 9))
    assert step.forward == (ForwardRow(0, 3, 8, 1, (9,), True),)
    assert hits(scheduler) == (8 + 8 + 9, 4 + 8)


@pytest.mark.parametrize("length", range(1, 14))
def test_every_length_begins_at_its_last_full_block_before_the_last_token(
    make_scheduler: MakeScheduler, length: int
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    prompt = tuple(range(10, 24))
    compute(scheduler, "a", prompt)
    step = compute(scheduler, "b", prompt[:length])
    start = (length - 1) // 4 * 4
    assert step.forward == (ForwardRow(0, 2, start, length - start, prompt[start:length], True),)
    assert step.appends[0].blocks[: start // 4] == (0, 1, 2)[: start // 4]


def test_the_first_different_token_ends_what_is_found(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    compute(scheduler, "a", (*SHARED, 9))
    # The second block holds what was computed behind another first one.
    assert compute(scheduler, "b", (50, *SHARED[1:], 9)).forward[0].start == 0
    assert compute(scheduler, "c", (*SHARED[:4], 50, *SHARED[5:], 9)).forward[0].start == 4
    assert compute(scheduler, "d", (*SHARED[4:], 9)).forward[0].start == 0


@pytest.mark.parametrize(
    ("first", "second", "start"),
    [("x", "x", 8), ("x", "y", 0), ("x", None, 0), (None, "x", 0), (None, None, 8)],
)
def test_prefixes_are_found_by_the_same_salt_alone(
    make_scheduler: MakeScheduler, first: str | None, second: str | None, start: int
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    compute(scheduler, "a", (*SHARED, 9), cache_salt=first)
    assert compute(scheduler, "b", (*SHARED, 9), cache_salt=second).forward[0].start == start


def test_output_is_found_once_it_has_returned(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (1, 2), max_tokens=20)
    scheduler.run()
    for chosen in (10, 11):  # Positions 2 and 3; the step that brings 11 wrote position 3 as well.
        assert compute_probe(scheduler, (1, 2, 10, 11, 50)) == 0
        scheduler.run(chosen)
    assert compute_probe(scheduler, (1, 2, 10, 11, 50)) == 4
    assert compute_probe(scheduler, (1, 2, 10, 12, 50)) == 0


def compute_probe(scheduler: Any, prompt: tuple[int, ...]) -> int:
    """How many tokens a request would find now."""
    scheduler.ask("probe", prompt)
    state = scheduler._states["probe"]
    found = scheduler._blocks.find_prefix(state)
    scheduler.abort("probe")
    return 4 * len(found)


def test_what_the_step_after_the_end_wrote_is_never_found(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (1, 2, 3), max_tokens=9)
    scheduler.run()
    step = scheduler.next_step()
    assert step.forward == (ForwardRow(0, 1, 3, 1, (), True),), "writes the end's own position"
    ended = RequestOutput(request_id="a", token_ids=(EOS,), finish_reason=FinishReason.STOP)
    assert scheduler.answer(step, EOS) == [ended]
    assert compute_probe(scheduler, (1, 2, 3, EOS, 50)) == 0


def test_a_token_in_flight_at_an_abort_is_never_found(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (1, 2, 3), max_tokens=9)
    scheduler.run()
    step = scheduler.next_step()
    scheduler.abort("a")
    assert scheduler.answer(step, 10) == []
    assert compute_probe(scheduler, (1, 2, 3, 10, 50)) == 0


def test_blocks_of_the_ended_are_lost_to_others_the_least_recently_used_and_tails_first(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=32)
    old, new = tuple(range(10, 19)), tuple(range(30, 39))
    compute(scheduler, "old", old)
    compute(scheduler, "new", new)
    compute(scheduler, "old again", old)
    assert scheduler.num_free_blocks == 8
    # Four of the eight hold prefixes. A request of 6 blocks takes new's, the tail one first.
    scheduler.ask("large", tuple(range(60, 80)), max_tokens=1)
    scheduler.answer(scheduler.next_step())
    assert (compute_probe(scheduler, old), compute_probe(scheduler, new)) == (8, 4)
    scheduler.abort("large")
    scheduler.check_integrity()


def test_a_prefix_in_use_is_not_lost(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=32)
    scheduler.ask("a", (*SHARED, 9), max_tokens=2)
    scheduler.run()
    scheduler.ask("large", tuple(range(60, 75)), max_tokens=1)
    step = scheduler.next_step()
    assert len(step.forward) == 2
    assert compute_probe(scheduler, (*SHARED, 9)) == 8
    # Five are free, and three of a request's six are shared: it fits where it would not alone.
    scheduler.answer(step, 10)
    scheduler.ask("b", (*SHARED, 9, 20), max_tokens=2)
    step = scheduler.next_step()
    assert [append for append in step.appends if append.slot == 2][0].blocks[:2] == (0, 1)
    scheduler.check_integrity()


def test_free_blocks_that_a_request_begins_with_are_no_room_for_the_rest_of_it(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=16)
    compute(scheduler, "a", (*SHARED, 9))
    scheduler.ask("holder", (50, 51, 52), max_tokens=1)
    scheduler.answer(scheduler.next_step())
    # 3 are free, 2 of them hold its prefix, and it needs 4.
    scheduler.ask("b", (*SHARED, 9, 10, 11, 12), max_tokens=2)
    step = scheduler.next_step()
    assert (step.new, scheduler.num_waiting) == ((), 1)
    scheduler.answer(step, EOS)
    step = scheduler.next_step()
    assert step.forward[0].start == 8
    assert step.appends[0].blocks[:2] == (0, 1)
    scheduler.check_integrity()


def test_a_preempted_request_continues_from_what_is_left_of_it(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(num_blocks=3)
    scheduler.ask("a", (1, 2, 3), max_tokens=9)
    scheduler.ask("b", (4, 5, 6), max_tokens=4)
    scheduler.run()
    scheduler.run(10, 20)
    scheduler.run(11, 21)  # a takes the last block, b goes; its block 1 is full, and known.
    scheduler.run(EOS)
    step = scheduler.next_step()
    assert step.new == (NewSlot(0, 2, 3, 0.0, 1.0, 0, 1),)
    assert step.appends == (BlockAppend(0, (1, 2)),)
    assert step.forward == (ForwardRow(0, 2, 4, 1, (21,), True),)
    assert scheduler.stats == SchedulerStats(
        prefix_cache_queries=6, prefix_cache_hits=0, num_preemptions=1
    ), "a replay is no look-up of a client's"


def test_a_chunked_prompt_is_found_as_far_as_it_has_got(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    prompt = tuple(range(10, 30))
    scheduler.ask("a", prompt)
    found = []
    for _ in range(4):
        scheduler.run()
        found.append(compute_probe(scheduler, prompt))
    assert found == [4, 12, 16, 16]


def test_without_prefix_caching_nothing_is_found_or_counted(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    compute(scheduler, "a", (*SHARED, 9))
    assert compute(scheduler, "b", (*SHARED, 9)).forward[0].start == 0
    assert hits(scheduler) == (0, 0)


def test_after_all_was_dropped_nothing_is_found(make_scheduler: MakeScheduler) -> None:
    """A group that ended has no cache; the next one begins with an empty one."""
    scheduler = make_scheduler()
    compute(scheduler, "a", (*SHARED, 9))
    scheduler.ask("b", (*SHARED, 9))
    scheduler.run()
    dropped = scheduler.drop_all(FinishReason.ERROR, "rank 1 died")
    assert [output.request_id for output in dropped] == ["b"]
    assert compute_probe(scheduler, (*SHARED, 9)) == 0
    assert scheduler.num_free_blocks == 16
    scheduler.check_integrity()
