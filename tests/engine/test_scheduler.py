"""Exact sequences of steps: what each call carries and what its answer means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tpinference_engine.errors import EngineBusy, GroupDiverged, RequestRefused
from tpinference_engine.request import FinishReason, Request, RequestOutput, SamplingParams
from tpinference_engine.scheduler.limits import SchedulerLimits
from tpinference_engine.scheduler.scheduler import Scheduler
from tpinference_engine.step import (
    MAX_STEP_ID,
    NO_STEP,
    BlockAppend,
    ForwardRow,
    NewSlot,
    SampledToken,
    SampleRow,
    StepInput,
    StepOutput,
)

EOS = 99
EPOCH = 5


def make_scheduler(seed: int = 0, **changes: Any) -> Scheduler:
    base: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_num_requests": 8,
        "max_model_len": 32,
        "block_size": 4,
        "num_blocks": 16,
        "vocab_size": 100,
        "eos_token_ids": (EOS,),
    }
    return Scheduler(SchedulerLimits(**{**base, **changes}), epoch=EPOCH, seed=seed)


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 8, **params: Any) -> Request:
    priority = params.pop("priority", 0)
    sampling: dict[str, Any] = {"temperature": 0.0, "seed": 1, **params}
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, **sampling),
        priority=priority,
    )


def next_step(scheduler: Scheduler) -> StepInput:
    step = scheduler.schedule()
    assert step is not None, "nothing to run"
    return step


def answer(scheduler: Scheduler, step: StepInput, *tokens: int) -> list[RequestOutput]:
    """What ranks that chose `tokens` for the step's SAMPLE rows say to it."""
    sampled = tuple(
        SampledToken(row.slot, row.generation, row.position, token)
        for row, token in zip(step.sample, tokens, strict=True)
    )
    before = step.step_id - 1 if step.step_id else MAX_STEP_ID
    return scheduler.update(
        StepOutput(step.step_id, EPOCH, 0, before if sampled else NO_STEP, 0, 0, sampled)
    )


def run(scheduler: Scheduler, *tokens: int) -> list[RequestOutput]:
    return answer(scheduler, next_step(scheduler), *tokens)


def token(name: str, *token_ids: int, finish: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=token_ids, finish_reason=finish)


def test_one_request_from_its_prompt_to_its_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", (7, 8, 9), max_tokens=2))
    # The prompt; nothing to sample yet.
    step = next_step(scheduler)
    assert step == StepInput(
        step_id=0,
        epoch=EPOCH,
        bucket=4,
        new=(NewSlot(0, 1, 3, 0.0, 1.0, 0, 1),),
        appends=(BlockAppend(0, (0,)),),
        forward=(ForwardRow(0, 1, 0, 3, (7, 8, 9), True),),
    )
    assert answer(scheduler, step) == []
    # The token at 3 is sampled and run by the same call, before its value is known here.
    step = next_step(scheduler)
    assert step == StepInput(
        step_id=1,
        epoch=EPOCH,
        bucket=1,
        sample=(SampleRow(0, 1, 3),),
        forward=(ForwardRow(0, 1, 3, 1, (), True),),
    )
    assert answer(scheduler, step, 10) == [token("a", 10)]
    # known 1 + in flight 1 = max_tokens: not run again, only flushed.
    step = next_step(scheduler)
    assert step == StepInput(step_id=2, epoch=EPOCH, bucket=0, sample=(SampleRow(0, 1, 4),))
    assert answer(scheduler, step, 11) == [token("a", 11, finish=FinishReason.LENGTH)]
    assert not scheduler.has_work
    assert scheduler.schedule() is None
    scheduler.check_integrity()


def test_a_freed_slot_is_told_with_the_next_call_and_has_a_new_generation() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", (7,), max_tokens=1))
    run(scheduler)
    run(scheduler, 10)
    scheduler.add(request("b", (8,), max_tokens=1))
    step = next_step(scheduler)
    assert step.free == (0,)
    assert [(new.slot, new.generation) for new in step.new] == [(0, 2)]


def test_decodes_go_first_then_prompts_in_chunks_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(request("a", (1, 2)))
    scheduler.add(request("b", (3, 4, 5, 6, 7)))
    scheduler.add(request("c", (8, 9)))
    first = next_step(scheduler)
    assert first.forward == (
        ForwardRow(0, 1, 0, 2, (1, 2), True),
        ForwardRow(1, 1, 0, 2, (3, 4), False),
    )
    answer(scheduler, first)
    second = next_step(scheduler)
    assert second.sample == (SampleRow(0, 1, 2),)
    assert second.forward == (
        ForwardRow(0, 1, 2, 1, (), True),
        ForwardRow(1, 1, 2, 3, (5, 6, 7), True),
    )
    answer(scheduler, second, 20)
    third = next_step(scheduler)
    assert third.sample == (SampleRow(0, 1, 3), SampleRow(1, 1, 5))
    assert third.forward == (
        ForwardRow(0, 1, 3, 1, (), True),
        ForwardRow(1, 1, 5, 1, (), True),
        ForwardRow(2, 1, 0, 2, (8, 9), True),
    )


def test_a_lower_priority_number_is_admitted_first() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(request("late", (1,), priority=3))
    scheduler.add(request("first", (2,), priority=-1))
    scheduler.add(request("second", (3,), priority=-1))
    assert next_step(scheduler).forward[0].tokens == (2,)
    scheduler.check_integrity()


def test_blocks_are_appended_when_a_request_grows_into_them() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", (1, 2, 3)))
    appends = []
    for tokens in ((), (5,), (5,), (5,), (5,), (5,), (5,)):
        step = next_step(scheduler)
        appends.append(step.appends)
        answer(scheduler, step, *tokens)
    one, two = (BlockAppend(0, (0,)),), (BlockAppend(0, (1,)),)
    assert appends == [one, (), two, (), (), (), (BlockAppend(0, (2,)),)]


@pytest.mark.parametrize(
    ("params", "chosen", "finish"),
    [
        ({}, EOS, FinishReason.STOP),
        ({"stop_token_ids": (55,)}, 55, FinishReason.STOP),
        ({"ignore_eos": True}, EOS, None),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, EOS, FinishReason.STOP),
        ({"max_tokens": 1}, EOS, FinishReason.STOP),
        ({"max_tokens": 1}, 55, FinishReason.LENGTH),
    ],
)
def test_what_ends_a_request(
    params: dict[str, Any], chosen: int, finish: FinishReason | None
) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", (1,), **params))
    run(scheduler)
    assert run(scheduler, chosen) == [token("a", chosen, finish=finish)]


def test_the_step_that_was_wasted_after_a_stop_is_flushed_and_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", (1,)))
    run(scheduler)
    run(scheduler, EOS)  # Carried a's next step already.
    assert scheduler.num_free_blocks == 16
    step = next_step(scheduler)
    assert step == StepInput(
        step_id=2, epoch=EPOCH, bucket=0, sample=(SampleRow(0, 1, 2),), free=(0,)
    )
    assert answer(scheduler, step, 42) == []
    assert scheduler.schedule() is None


def test_a_late_token_does_not_go_to_the_new_owner_of_the_slot() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(request("a", (1,)))
    scheduler.add(request("b", (2,)))
    run(scheduler)
    assert scheduler.abort("a") == token("a", finish=FinishReason.ABORT)
    step = next_step(scheduler)
    assert (step.sample, step.free) == ((SampleRow(0, 1, 1),), (0,))
    assert [(new.slot, new.generation) for new in step.new] == [(0, 2)]
    assert answer(scheduler, step, 42) == []
    assert run(scheduler, 43) == [token("b", 43)]


def test_an_abort_of_a_waiting_request_is_answered_too() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", (1,)))
    assert scheduler.abort("a") == token("a", finish=FinishReason.ABORT)
    assert scheduler.abort("a") is None
    assert scheduler.schedule() is None
    scheduler.check_integrity()


def test_the_latest_is_preempted_keeps_its_token_in_flight_and_replays_it() -> None:
    scheduler = make_scheduler(num_blocks=3)
    scheduler.add(request("a", (1, 2, 3), max_tokens=9))
    scheduler.add(request("b", (4, 5, 6), max_tokens=4))
    run(scheduler)  # Both prompts, one block each.
    run(scheduler, 10, 20)  # Position 3.
    step = next_step(scheduler)  # Position 4: a takes the last free block, b has to go.
    assert step.sample == (SampleRow(0, 1, 4), SampleRow(1, 1, 4))
    assert step.forward == (ForwardRow(0, 1, 4, 1, (), True),)
    assert (step.free, step.appends) == ((1,), (BlockAppend(0, (2,)),))
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert answer(scheduler, step, 11, 21) == [token("a", 11), token("b", 21)]
    run(scheduler, EOS)  # a ends, carrying one step too many.
    step = next_step(scheduler)
    assert step.new == (NewSlot(0, 2, 3, 0.0, 1.0, 0, 1),), "of the user's prompt alone"
    assert step.forward == (ForwardRow(0, 2, 0, 5, (4, 5, 6, 20, 21), True),)
    assert answer(scheduler, step, 12) == []
    assert run(scheduler, 22) == [token("b", 22)]
    scheduler.check_integrity()


def test_a_preempted_request_may_end_by_its_token_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=3)
    scheduler.add(request("a", (1, 2, 3), max_tokens=9))
    scheduler.add(request("b", (4, 5, 6), max_tokens=9))
    run(scheduler)
    run(scheduler, 10, 20)
    assert run(scheduler, 11, EOS) == [
        token("a", 11),
        token("b", EOS, finish=FinishReason.STOP),
    ]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    scheduler.check_integrity()


def test_a_prompt_takes_blocks_from_a_decode_of_less_priority_and_its_row_with_them() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5, num_blocks=6)
    scheduler.add(request("late", (2,) * 5, max_tokens=15, priority=1))
    run(scheduler)
    scheduler.add(request("early", (1,) * 13, max_tokens=2))
    scheduler._limits = replace(scheduler.limits, max_num_batched_tokens=2)
    for chosen in range(8):
        run(scheduler, chosen)
    assert scheduler.num_free_blocks == 0
    # The decode was chosen first, then the prompt's next token needs a block of its own.
    step = next_step(scheduler)
    assert step.forward == (ForwardRow(1, 1, 8, 1, (1,), False),)
    assert [append.slot for append in step.appends] == [1]
    assert (step.sample, step.free) == ((SampleRow(0, 1, 13),), (0,))
    assert answer(scheduler, step, 8) == [token("late", 8)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    scheduler.check_integrity()


def test_nobody_is_admitted_by_the_step_that_preempts() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=16)
    scheduler.add(request("a", (3,) * 6, max_tokens=18))
    scheduler.add(request("latest", (4,) * 5, max_tokens=9, priority=1))
    run(scheduler)
    for chosen in range(6):
        run(scheduler, chosen, chosen)
    assert scheduler.num_free_blocks == 0
    # It would fit into what the latest gives up now; that is for the next step.
    scheduler.add(request("next", (5, 6), max_tokens=2))
    step = next_step(scheduler)
    assert (step.free, step.new, len(step.forward)) == ((1,), (), 1)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    answer(scheduler, step, 7, 7)
    assert next_step(scheduler).new == (NewSlot(1, 2, 2, 0.0, 1.0, 0, 1),)


def test_blocks_that_a_prompt_still_needs_are_not_given_to_an_arrival() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=16)
    scheduler.add(request("a", (1,) * 12, max_tokens=2))
    scheduler.add(request("b", (2,), max_tokens=2))
    step = next_step(scheduler)
    assert scheduler.num_free_blocks == 1
    assert [row.num_tokens for row in step.forward] == [12]


def test_a_waiting_request_that_does_not_fit_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=16)
    scheduler.add(request("a", (1,) * 7, max_tokens=2))
    scheduler.add(request("large", (2,) * 9, max_tokens=2))
    scheduler.add(request("small", (3,), max_tokens=2))
    assert len(next_step(scheduler).forward) == 1
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_no_request_outgrows_the_smaller_of_model_and_cache() -> None:
    scheduler = make_scheduler(num_blocks=2)
    assert scheduler.limits.max_request_tokens == 8
    scheduler.add(request("a", (1,) * 5, max_tokens=3))
    outputs = run(scheduler)
    for chosen in (10, 11, 12):
        outputs += run(scheduler, chosen)
    assert outputs[-1] == token("a", 12, finish=FinishReason.LENGTH)
    assert scheduler.schedule() is None


def test_a_flush_samples_and_runs_nothing() -> None:
    scheduler = make_scheduler()
    assert scheduler.flush() is None
    scheduler.add(request("a", (1,)))
    run(scheduler)
    step = scheduler.flush()
    assert step == StepInput(step_id=1, epoch=EPOCH, bucket=0, sample=(SampleRow(0, 1, 1),))
    assert answer(scheduler, step, 10) == [token("a", 10)]
    assert scheduler.flush() is None
    # The token is known now, so it travels with its row.
    assert next_step(scheduler).forward == (ForwardRow(0, 1, 1, 1, (10,), True),)


def test_dropping_all_ends_running_and_waiting_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(request("a", (1,)))
    scheduler.add(request("b", (2,)))
    run(scheduler)
    outputs = scheduler.drop_all(FinishReason.ERROR, "rank 1 died")
    assert {(o.request_id, o.finish_reason, o.error) for o in outputs} == {
        ("a", FinishReason.ERROR, "rank 1 died"),
        ("b", FinishReason.ERROR, "rank 1 died"),
    }
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_free_blocks) == (0, 0, 16)
    scheduler.check_integrity()


def test_the_queue_is_bounded() -> None:
    scheduler = make_scheduler(max_num_requests=2)
    scheduler.add(request("a", (1,)))
    scheduler.add(request("b", (1,)))
    with pytest.raises(EngineBusy, match="2 requests are queued or running, the limit is 2"):
        scheduler.add(request("c", (1,)))
    scheduler.abort("a")
    scheduler.add(request("c", (1,)))


def test_a_request_id_is_used_once_at_a_time() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", (1,)))
    with pytest.raises(RequestRefused, match="'a' is in use"):
        scheduler.add(request("a", (2,)))


def seeds_of(scheduler: Scheduler, count: int) -> list[int]:
    for index in range(count):
        scheduler.add(request(str(index), (1,), seed=None))
    return [new.seed for new in next_step(scheduler).new]


def test_unseeded_requests_get_seeds_that_the_engines_seed_repeats() -> None:
    first, again, other = (seeds_of(make_scheduler(seed=s), 4) for s in (3, 3, 4))
    assert first == again
    assert len({*first, *other}) == 8
    assert all(-(2**63) <= seed < 2**63 for seed in first)


def test_a_preempted_request_keeps_the_seed_it_was_given() -> None:
    scheduler = make_scheduler(num_blocks=3)
    scheduler.add(request("a", (1, 2, 3), max_tokens=9))
    scheduler.add(request("b", (4, 5, 6), max_tokens=4, seed=None))
    first = next_step(scheduler)
    answer(scheduler, first)
    run(scheduler, 10, 20)
    run(scheduler, 11, 21)
    run(scheduler, EOS)
    assert next_step(scheduler).new[0].seed == first.new[1].seed


def test_step_ids_go_round() -> None:
    scheduler = make_scheduler()
    scheduler._step_id = MAX_STEP_ID - 1
    scheduler.add(request("a", (1,), max_tokens=3))
    ids = []
    for tokens in ((), (10,), (11,), (12,)):
        step = next_step(scheduler)
        ids.append(step.step_id)
        answer(scheduler, step, *tokens)
    assert ids == [MAX_STEP_ID, 0, 1, 2]


wrong_answers: list[tuple[str, Callable[[StepInput], StepOutput]]] = [
    ("step", lambda s: output_of(s, step_id=s.step_id + 1)),
    ("epoch", lambda s: output_of(s, epoch=EPOCH + 1)),
    ("sampled step", lambda s: output_of(s, sampled_step_id=s.step_id)),
    ("no tokens", lambda s: output_of(s, tokens=())),
    ("position", lambda s: output_of(s, tokens=(SampledToken(0, 1, 9, 10),))),
    ("generation", lambda s: output_of(s, tokens=(SampledToken(0, 2, 1, 10),))),
    ("slot", lambda s: output_of(s, tokens=(SampledToken(1, 1, 1, 10),))),
]


def output_of(step: StepInput, **changes: Any) -> StepOutput:
    base: dict[str, Any] = {
        "step_id": step.step_id,
        "epoch": EPOCH,
        "sampled_step_id": step.step_id - 1,
        "tokens": (SampledToken(0, 1, 1, 10),),
    }
    return StepOutput(rank=0, crc=0, skew_us=0, **{**base, **changes})


@pytest.mark.parametrize(
    "make", [make for _, make in wrong_answers], ids=[name for name, _ in wrong_answers]
)
def test_an_answer_that_does_not_match_fails_the_group(
    make: Callable[[StepInput], StepOutput],
) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", (1,)))
    run(scheduler)
    step = next_step(scheduler)
    with pytest.raises(GroupDiverged, match="expected"):
        scheduler.update(make(step))


def test_steps_and_answers_alternate() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", (1,)))
    step = next_step(scheduler)
    with pytest.raises(AssertionError, match="step 0 has not been answered"):
        scheduler.schedule()
    answer(scheduler, step)
    with pytest.raises(AssertionError, match="answered twice"):
        answer(scheduler, step)
