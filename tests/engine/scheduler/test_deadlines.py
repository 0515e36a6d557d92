"""A request past its deadline ends wherever it is; the clock is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpinference_engine.request import FinishReason, RequestOutput
from tpinference_engine.step import SampleRow

MakeScheduler = Callable[..., Any]


def late(name: str, num_tokens: int) -> RequestOutput:
    return RequestOutput(
        request_id=name,
        token_ids=(),
        finish_reason=FinishReason.DEADLINE,
        error=f"the request's deadline passed; it had {num_tokens} tokens of its answer",
    )


def test_a_waiting_and_a_running_request_end_and_give_back_what_they_have(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.ask("running", (1, 2), deadline=10.0)
    scheduler.ask("patient", (3, 4))
    scheduler.ask("waiting", (5, 6), deadline=9.0)
    scheduler.run()
    scheduler.run(10, 20)
    assert scheduler.expire(8.9) == []
    assert scheduler.expire(9.0) == [late("waiting", 0)]
    assert scheduler.expire(11.0) == [late("running", 1)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    # Its token in flight is sampled and dropped, and its slot told to be free.
    step = scheduler.next_step()
    assert step.sample == (SampleRow(0, 1, 3), SampleRow(1, 1, 3))
    assert step.free == (0,)
    outputs = scheduler.answer(step, 11, 21)
    assert [output.request_id for output in outputs] == ["patient"]
    scheduler.abort("patient")
    assert scheduler.num_free_blocks == 16
    scheduler.check_integrity()


def test_a_request_may_end_between_a_step_and_its_answer(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.ask("a", (1, 2), deadline=1.0)
    scheduler.run()
    step = scheduler.next_step()
    assert scheduler.expire(2.0) == [late("a", 0)]
    assert scheduler.answer(step, 10) == []
    assert scheduler.next_step().bucket == 0
    scheduler.check_integrity()


def test_a_preempted_request_has_its_deadline_still(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=3)
    scheduler.ask("a", (1, 2, 3), max_tokens=9)
    scheduler.ask("b", (4, 5, 6), max_tokens=4, deadline=5.0)
    scheduler.run()
    scheduler.run(10, 20)
    scheduler.run(11, 21)
    assert scheduler.num_waiting == 1
    assert scheduler.expire(5.0) == [late("b", 2)]
    assert scheduler.num_waiting == 0
    scheduler.check_integrity()


def test_requests_end_by_their_own_deadlines_in_any_order(make_scheduler: MakeScheduler) -> None:
    """Also behind one that has ended, been aborted, or came later with an earlier deadline."""
    scheduler = make_scheduler()
    for name, deadline in (("a", 5.0), ("b", 3.0), ("c", None), ("d", 4.0), ("e", 4.0)):
        scheduler.ask(name, (1,), deadline=deadline)
    scheduler.abort("b")
    assert scheduler.expire(3.5) == []
    scheduler.ask("f", (1,), deadline=3.8)
    assert scheduler.expire(3.9) == [late("f", 0)]
    assert scheduler.expire(4.5) == [late("d", 0), late("e", 0)]
    assert scheduler.expire(4.5) == []
    scheduler.ask("b", (1,))  # The name again, without a deadline.
    assert scheduler.expire(100.0) == [late("a", 0)]
    assert scheduler.num_waiting == 2
