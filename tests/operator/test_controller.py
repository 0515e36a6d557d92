"""controller.py: which key is worked on when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tpinference_operator.controller import Backoff, Controller, Key, WorkQueue
from tpinference_operator.errors import ApiConflict, ApiUnavailable

A, B = ("ns", "a"), ("ns", "b")


class Held:
    async def wait_held(self) -> None:
        return


@dataclass
class Work:
    """A reconcile that notes its calls and can be held up."""

    answer: Callable[[Key], float | None | Exception] = lambda _: None
    calls: list[Key] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def __call__(self, key: Key) -> float | None:
        self.calls.append(key)
        self.changed.set()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.gate.wait()
        self.at_once -= 1
        answer = self.answer(key)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def seen(self, num_calls: int) -> None:
        async with asyncio.timeout(5):
            while len(self.calls) < num_calls:
                self.changed.clear()
                await self.changed.wait()


def work_that_fails_once() -> Work:
    failures = iter([ApiUnavailable("down")])
    return Work(answer=lambda _: next(failures, None))


async def nothing() -> None:
    return


@asynccontextmanager
async def running(
    work: Work,
    *,
    keys: tuple[Key, ...] = (),
    resync_s: float = 1000,
    num_workers: int = 2,
    wait_indexed: Callable[[], Coroutine[None, None, None]] = nothing,
    first_backoff_s: float = 0.01,
) -> AsyncIterator[Controller]:
    controller = Controller(
        work,
        known_keys=lambda: keys,
        wait_indexed=wait_indexed,
        resync_s=resync_s,
        num_workers=num_workers,
        backoff=Backoff(first_backoff_s, 100),
    )
    task = asyncio.create_task(controller.run(Held()))
    yield controller
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_key_that_is_queued_is_not_queued_again() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    for key in (A, B, A, A):
        queue.add(key)
    assert [await queue.take(), await queue.take()] == [A, B]
    assert queue.is_idle() is False


async def test_one_key_is_never_worked_on_twice_at_once_and_not_forgotten() -> None:
    work = Work()
    work.gate.clear()
    async with running(work) as controller:
        controller.enqueue(A)
        await work.seen(1)
        for _ in range(5):
            controller.enqueue(A)
        assert work.calls == [A]
        work.gate.set()
        await work.seen(2)
    assert (work.calls, work.most_at_once) == ([A, A], 1)


async def test_different_keys_are_worked_on_side_by_side() -> None:
    work = Work()
    work.gate.clear()
    async with running(work) as controller:
        controller.enqueue(A)
        controller.enqueue(B)
        await work.seen(2)
        assert work.at_once == 2
        work.gate.set()


async def test_a_reconcile_says_when_to_look_again() -> None:
    answers = iter([0.01, None])
    work = Work(answer=lambda _: next(answers))
    async with running(work) as controller:
        controller.enqueue(A)
        await work.seen(2)


@pytest.mark.parametrize(
    "error", [ApiUnavailable("down"), ApiConflict("changed"), KeyError("a bug")]
)
async def test_a_failure_is_tried_again_and_stops_nobody_else(error: Exception) -> None:
    failures = iter([error, error])
    work = Work(answer=lambda key: next(failures, None) if key == A else None)
    async with running(work, num_workers=1) as controller:
        controller.enqueue(A)
        controller.enqueue(B)
        await work.seen(4)
    assert work.calls[:2] == [A, B]
    assert work.calls.count(A) == 3


async def test_events_do_not_cut_a_back_off_short_but_a_new_generation_does() -> None:
    work = work_that_fails_once()
    async with running(work, first_backoff_s=100) as controller:
        controller.enqueue_owner(A, 1)
        await work.seen(1)
        await asyncio.sleep(0)
        for _ in range(3):
            controller.enqueue(A)
            controller.enqueue_owner(A, 1)
        assert controller.queue.is_idle()
        controller.enqueue_owner(A, 2)
        await work.seen(2)


@pytest.mark.parametrize(("generation", "num_calls"), [(1, 1), (2, 2)])
async def test_what_came_during_a_failed_try_waits_unless_it_is_a_new_generation(
    generation: int, num_calls: int
) -> None:
    work = work_that_fails_once()
    work.gate.clear()
    async with running(work, first_backoff_s=100) as controller:
        controller.enqueue_owner(A, 1)
        await work.seen(1)
        controller.enqueue(A)
        controller.enqueue_owner(A, generation)
        work.gate.set()
        await work.seen(num_calls)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(work.calls) == num_calls


async def test_an_object_that_goes_while_it_backs_off_is_looked_at_and_forgotten() -> None:
    work = work_that_fails_once()
    async with running(work, first_backoff_s=100) as controller:
        controller.enqueue_owner(A, 1)
        await work.seen(1)
        await asyncio.sleep(0)
        controller.enqueue_gone(A)
        await work.seen(2)


async def test_a_server_that_says_when_to_come_again_is_obeyed() -> None:
    failures = iter([ApiUnavailable("busy", status=429, retry_after_s=30.0)])
    work = Work(answer=lambda _: next(failures, None))
    async with running(work, first_backoff_s=0.0) as controller:
        controller.enqueue_owner(A, 1)
        await work.seen(1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert controller.queue.is_idle() and work.calls == [A]


async def test_a_conflict_does_not_hold_the_newer_version_back() -> None:
    failures = iter([ApiConflict("changed")])
    work = Work(answer=lambda _: next(failures, None))
    async with running(work, first_backoff_s=100) as controller:
        controller.enqueue(A)
        await work.seen(1)
        await asyncio.sleep(0)
        controller.enqueue(A)
        await work.seen(2)


def test_back_off_doubles_up_to_its_cap() -> None:
    backoff = Backoff(0.5, 60)
    assert [backoff.delay_s(n) for n in (1, 2, 3, 8, 1000)] == [0.5, 1, 2, 60, 60]


async def test_of_two_delays_the_earlier_one_counts() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    queue.add_after(A, 100)
    queue.add_after(A, 0.0)
    queue.add_after(A, 100)
    async with asyncio.timeout(5):
        assert await queue.take() == A
    queue.done(A)
    assert queue.is_idle()


async def test_resync_brings_every_known_key() -> None:
    work = Work()
    async with running(work, keys=(A, B), resync_s=0.01):
        await work.seen(4)
    assert {A, B} == set(work.calls)


async def test_nothing_is_worked_on_before_the_indexes_are_complete() -> None:
    work, complete = Work(), asyncio.Event()

    async def wait_indexed() -> None:
        await complete.wait()

    async with running(work, wait_indexed=wait_indexed) as controller:
        controller.enqueue(A)
        await asyncio.sleep(0)
        assert work.calls == []
        complete.set()
        await work.seen(1)


async def test_nothing_is_worked_on_before_the_lease_is_held() -> None:
    work, held = Work(), asyncio.Event()

    class Waiting:
        async def wait_held(self) -> None:
            await held.wait()

    controller = Controller(
        work, known_keys=lambda: (), wait_indexed=nothing, resync_s=1, num_workers=1
    )
    task = asyncio.create_task(controller.run(Waiting()))
    controller.enqueue(A)
    await asyncio.sleep(0)
    # They are there all the same: kopf, when it restarts, cancels what is younger than itself.
    assert "worker 0" in {task.get_name() for task in asyncio.all_tasks()}
    await asyncio.sleep(0)
    assert work.calls == []
    held.set()
    await work.seen(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
