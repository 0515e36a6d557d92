"""Exact sequences of steps: what each call carries and what its answer means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tpinference_engine.errors import EngineBusy, GroupDiverged, RequestRefused
from tpinference_engine.request import FinishReason, RequestOutput
from tpinference_engine.step import (
    MAX_STEP_ID,
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


def token(name: str, *token_ids: int, finish: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=token_ids, finish_reason=finish)


def test_one_request_from_its_prompt_to_its_last_token(make_scheduler: Callable[..., Any]) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (7, 8, 9), max_tokens=2)
    # The prompt; nothing to sample yet.
    step = scheduler.next_step()
    assert step == StepInput(
        step_id=0,
        epoch=EPOCH,
        bucket=4,
        new=(NewSlot(0, 1, 3, 0.0, 1.0, 0, 1),),
        appends=(BlockAppend(0, (0,)),),
        forward=(ForwardRow(0, 1, 0, 3, (7, 8, 9), True),),
    )
    assert scheduler.answer(step) == []
    # The token at 3 is sampled and run by the same call, before its value is known here.
    step = scheduler.next_step()
    assert step == StepInput(
        step_id=1,
        epoch=EPOCH,
        bucket=1,
        sample=(SampleRow(0, 1, 3),),
        forward=(ForwardRow(0, 1, 3, 1, (), True),),
    )
    assert scheduler.answer(step, 10) == [token("a", 10)]
    # known 1 + in flight 1 = max_tokens: not run again, only flushed.
    step = scheduler.next_step()
    assert step == StepInput(step_id=2, epoch=EPOCH, bucket=0, sample=(SampleRow(0, 1, 4),))
    assert scheduler.answer(step, 11) == [token("a", 11, finish=FinishReason.LENGTH)]
    assert not scheduler.has_work
    assert scheduler.schedule() is None
    scheduler.check_integrity()


def test_a_freed_slot_is_told_with_the_next_call_and_has_a_new_generation(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (7,), max_tokens=1)
    scheduler.run()
    scheduler.run(10)
    scheduler.ask("b", (8,), max_tokens=1)
    step = scheduler.next_step()
    assert step.free == (0,)
    assert [(new.slot, new.generation) for new in step.new] == [(0, 2)]


def test_decodes_go_first_then_prompts_in_chunks_in_order_of_arrival(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.ask("a", (1, 2))
    scheduler.ask("b", (3, 4, 5, 6, 7))
    scheduler.ask("c", (8, 9))
    first = scheduler.next_step()
    assert first.forward == (
        ForwardRow(0, 1, 0, 2, (1, 2), True),
        ForwardRow(1, 1, 0, 2, (3, 4), False),
    )
    scheduler.answer(first)
    second = scheduler.next_step()
    assert second.sample == (SampleRow(0, 1, 2),)
    assert second.forward == (
        ForwardRow(0, 1, 2, 1, (), True),
        ForwardRow(1, 1, 2, 3, (5, 6, 7), True),
    )
    scheduler.answer(second, 20)
    third = scheduler.next_step()
    assert third.sample == (SampleRow(0, 1, 3), SampleRow(1, 1, 5))
    assert third.forward == (
        ForwardRow(0, 1, 3, 1, (), True),
        ForwardRow(1, 1, 5, 1, (), True),
        ForwardRow(2, 1, 0, 2, (8, 9), True),
    )


def test_a_lower_priority_number_is_admitted_first(make_scheduler: Callable[..., Any]) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.ask("late", (1,), priority=3)
    scheduler.ask("first", (2,), priority=-1)
    scheduler.ask("second", (3,), priority=-1)
    assert scheduler.next_step().forward[0].tokens == (2,)
    scheduler.check_integrity()


def test_equal_priorities_go_by_arrival_and_a_late_one_of_more_priority_passes_the_waiting(
    make_scheduler: Callable[..., Any],
) -> None:
    """It takes no slot from who runs: only blocks are taken, by who runs already."""
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.ask("runs", (1,), max_tokens=1, priority=5)
    scheduler.run()
    for name, token_id, priority in (("a", 2, 1), ("b", 3, 1), ("c", 4, 0)):
        scheduler.ask(name, (token_id,), max_tokens=1, priority=priority)
    began = []
    for _ in range(8):
        step = scheduler.schedule()
        if step is None:
            break
        began += [row.tokens[0] for row in step.forward]
        scheduler.answer(step, *(7 for _ in step.sample))
    assert began == [4, 2, 3]


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
    make_scheduler: Callable[..., Any],
    params: dict[str, Any],
    chosen: int,
    finish: FinishReason | None,
) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (1,), **params)
    scheduler.run()
    assert scheduler.run(chosen) == [token("a", chosen, finish=finish)]


def test_the_step_that_was_wasted_after_a_stop_is_flushed_and_dropped(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (1,))
    scheduler.run()
    scheduler.run(EOS)  # Carried a's next step already.
    assert scheduler.num_free_blocks == 16
    step = scheduler.next_step()
    assert step == StepInput(
        step_id=2, epoch=EPOCH, bucket=0, sample=(SampleRow(0, 1, 2),), free=(0,)
    )
    assert scheduler.answer(step, 42) == []
    assert scheduler.schedule() is None


def test_a_late_token_does_not_go_to_the_new_owner_of_the_slot(
    make_scheduler: Callable[..., Any],
) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.ask("a", (1,))
    scheduler.ask("b", (2,))
    scheduler.run()
    assert scheduler.abort("a") == token("a", finish=FinishReason.ABORT)
    step = scheduler.next_step()
    assert (step.sample, step.free) == ((SampleRow(0, 1, 1),), (0,))
    assert [(new.slot, new.generation) for new in step.new] == [(0, 2)]
    assert scheduler.answer(step, 42) == []
    assert scheduler.run(43) == [token("b", 43)]


def test_an_abort_of_a_waiting_request_is_answered_too(make_scheduler: Callable[..., Any]) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (1,))
    assert scheduler.abort("a") == token("a", finish=FinishReason.ABORT)
    assert scheduler.abort("a") is None
    assert scheduler.schedule() is None
    scheduler.check_integrity()


def test_a_flush_samples_and_runs_nothing(make_scheduler: Callable[..., Any]) -> None:
    scheduler = make_scheduler()
    assert scheduler.flush() is None
    scheduler.ask("a", (1,))
    scheduler.run()
    step = scheduler.flush()
    assert step == StepInput(step_id=1, epoch=EPOCH, bucket=0, sample=(SampleRow(0, 1, 1),))
    assert scheduler.answer(step, 10) == [token("a", 10)]
    assert scheduler.flush() is None
    # The token is known now, so it travels with its row.
    assert scheduler.next_step().forward == (ForwardRow(0, 1, 1, 1, (10,), True),)


def test_dropping_all_ends_running_and_waiting_requests(make_scheduler: Callable[..., Any]) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.ask("a", (1,))
    scheduler.ask("b", (2,))
    scheduler.run()
    outputs = scheduler.drop_all(FinishReason.ERROR, "rank 1 died")
    assert {(o.request_id, o.finish_reason, o.error) for o in outputs} == {
        ("a", FinishReason.ERROR, "rank 1 died"),
        ("b", FinishReason.ERROR, "rank 1 died"),
    }
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_free_blocks) == (0, 0, 16)
    scheduler.check_integrity()


def test_the_queue_is_bounded(make_scheduler: Callable[..., Any]) -> None:
    scheduler = make_scheduler(max_num_requests=2)
    scheduler.ask("a", (1,))
    scheduler.ask("b", (1,))
    with pytest.raises(EngineBusy, match="2 requests are queued or running, the limit is 2"):
        scheduler.ask("c", (1,))
    scheduler.abort("a")
    scheduler.ask("c", (1,))


def test_a_request_id_is_used_once_at_a_time(make_scheduler: Callable[..., Any]) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (1,))
    with pytest.raises(RequestRefused, match="'a' is in use"):
        scheduler.ask("a", (2,))


def seeds_of(scheduler: Any, count: int) -> list[int]:
    for index in range(count):
        scheduler.ask(str(index), (1,), seed=None)
    return [new.seed for new in scheduler.next_step().new]


def test_unseeded_requests_get_seeds_that_the_engines_seed_repeats(
    make_scheduler: Callable[..., Any],
) -> None:
    first, again, other = (seeds_of(make_scheduler(seed=s), 4) for s in (3, 3, 4))
    assert first == again
    assert len({*first, *other}) == 8
    assert all(-(2**63) <= seed < 2**63 for seed in first)


def test_step_ids_go_round(make_scheduler: Callable[..., Any]) -> None:
    scheduler = make_scheduler()
    scheduler._step_id = MAX_STEP_ID - 1
    scheduler.ask("a", (1,), max_tokens=3)
    ids = []
    for tokens in ((), (10,), (11,), (12,)):
        step = scheduler.next_step()
        ids.append(step.step_id)
        scheduler.answer(step, *tokens)
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
    make_scheduler: Callable[..., Any], make: Callable[[StepInput], StepOutput]
) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (1,))
    scheduler.run()
    step = scheduler.next_step()
    with pytest.raises(GroupDiverged, match="expected"):
        scheduler.update(make(step))


def test_steps_and_answers_alternate(make_scheduler: Callable[..., Any]) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (1,))
    step = scheduler.next_step()
    with pytest.raises(AssertionError, match="step 0 has not been answered"):
        scheduler.schedule()
    scheduler.answer(step)
    with pytest.raises(AssertionError, match="answered twice"):
        scheduler.answer(step)
