"""lease.py: one holder at a time, whatever the API server does. Time is given, nothing sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tpinference_operator.errors import ApiUnavailable
from tpinference_operator.kube import Answer, Kube, Request
from tpinference_operator.lease import Clock, Lease, LeaseLost, LeaseTimes

PATH = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/op"


class GivenClock(Clock):
    """A sleep is its length, and over at once."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    async def sleep(self, delay_s: float) -> None:
        self.time += delay_s
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> GivenClock:
    return GivenClock()


@pytest.fixture
def make_lease(kube: Kube, clock: GivenClock) -> Callable[[str], Lease]:
    def make(identity: str) -> Lease:
        return Lease(
            kube, namespace="ns", name="op", identity=identity, times=LeaseTimes(), clock=clock
        )

    return make


async def until_held(lease: Lease) -> asyncio.Task[None]:
    task = asyncio.create_task(lease.run())
    await asyncio.wait_for(lease.wait_held(), 5)
    return task


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_first_replica_creates_and_holds_it(
    api: Any, make_lease: Callable[[str], Lease]
) -> None:
    lease = make_lease("a")
    task = await until_held(lease)
    assert lease.is_held
    spec = api.objects[PATH]["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("a", 10)
    lease.fence()
    await end(task)


async def test_a_clean_stop_empties_it_and_a_successor_need_not_wait(
    api: Any, make_lease: Callable[[str], Lease], clock: GivenClock
) -> None:
    await end(await until_held(make_lease("a")))
    assert api.objects[PATH]["spec"]["holderIdentity"] == ""
    before = clock.time
    taken_at = time_of_first_write(api, clock)
    task = await until_held(make_lease("b"))
    assert taken_at() - before < 1
    assert api.objects[PATH]["spec"]["leaseTransitions"] == 2
    await end(task)


async def test_a_crashed_holder_is_waited_for_by_the_watchers_own_clock(
    api: Any, make_lease: Callable[[str], Lease], clock: GivenClock
) -> None:
    api.put(PATH, lease_of("gone", renew_time="2001-01-01T00:00:00.000000Z"))
    before = clock.time
    taken_at = time_of_first_write(api, clock)
    task = await until_held(make_lease("b"))
    assert 10 <= taken_at() - before <= 12
    await end(task)


async def test_a_holder_that_renews_is_never_overtaken(
    api: Any, make_lease: Callable[[str], Lease], clock: GivenClock
) -> None:
    renewals = iter(range(50))

    def renew(request: Request) -> Answer | None:
        if request.method == "GET" and request.path == PATH:
            number = next(renewals, None)
            if number is not None:
                body = lease_of("a", renew_time=f"t{number}")
                api.put(PATH, body | {"metadata": {"name": "op", "uid": "u"}})
        return None

    api.refuse = renew
    before = clock.time
    task = await until_held(make_lease("b"))
    assert clock.time - before >= 50 * 2 + 10 - 4
    await end(task)


async def test_an_unreachable_api_server_ends_the_holder_at_the_deadline(
    api: Any, make_lease: Callable[[str], Lease], clock: GivenClock
) -> None:
    lease = make_lease("a")
    task = await until_held(lease)
    held_at = clock.time
    api.refuse = lambda _: ApiUnavailable("down")
    with pytest.raises(LeaseLost, match="not renewed within 7 s"):
        await asyncio.wait_for(task, 5)
    assert clock.time - held_at <= 9.001
    assert not lease.is_held


async def test_a_write_whose_answer_is_lost_counts_as_not_renewed(
    api: Any, make_lease: Callable[[str], Lease], clock: GivenClock
) -> None:
    task = await until_held(make_lease("a"))
    api.lose_answers = True
    with pytest.raises(LeaseLost, match="not renewed"):
        await asyncio.wait_for(task, 5)


async def test_a_short_outage_is_survived(
    api: Any, make_lease: Callable[[str], Lease], clock: GivenClock
) -> None:
    lease = make_lease("a")
    task = await until_held(lease)
    outage_ends = clock.time + 4

    def down(_: Request) -> ApiUnavailable | None:
        return ApiUnavailable("down") if clock.time < outage_ends else None

    api.refuse = down
    await asyncio.wait_for(wait_until(lambda: clock.time > outage_ends + 10), 5)
    assert lease.is_held and not task.done()
    await end(task)


async def test_another_holder_means_lost_at_once(
    api: Any, make_lease: Callable[[str], Lease], clock: GivenClock
) -> None:
    task = await until_held(make_lease("a"))
    before = clock.time
    api.put(PATH, lease_of("thief", renew_time="x"))
    with pytest.raises(LeaseLost, match="'thief'"):
        await asyncio.wait_for(task, 5)
    assert clock.time - before <= 3
    assert api.objects[PATH]["spec"]["holderIdentity"] == "thief"


async def test_two_replicas_that_start_together_get_one_holder(
    api: Any, make_lease: Callable[[str], Lease], clock: GivenClock
) -> None:
    leases = [make_lease(name) for name in "abc"]
    tasks = [asyncio.create_task(lease.run()) for lease in leases]
    await asyncio.wait_for(wait_until(lambda: clock.time > 1100), 5)
    assert sum(lease.is_held for lease in leases) == 1
    for task in tasks:
        await end(task)


async def test_a_deleted_lease_is_made_again(
    api: Any, make_lease: Callable[[str], Lease], clock: GivenClock
) -> None:
    lease = make_lease("a")
    task = await until_held(lease)
    del api.objects[PATH]
    await asyncio.wait_for(wait_until(lambda: PATH in api.objects), 5)
    assert lease.is_held
    await end(task)


async def test_the_fence_notices_that_the_process_was_stopped(
    make_lease: Callable[[str], Lease], clock: GivenClock
) -> None:
    lease = make_lease("a")
    with pytest.raises(RuntimeError, match="before the Lease is held"):
        lease.fence()
    task = await until_held(lease)
    clock.time += 8
    with pytest.raises(LeaseLost):
        lease.fence()
    await end(task)


@pytest.mark.parametrize(("duration", "deadline", "retry"), [(7, 7, 2), (10, 4, 2), (10, 7, 0)])
def test_impossible_times_are_refused(duration: float, deadline: float, retry: float) -> None:
    with pytest.raises(ValueError, match="lease times"):
        LeaseTimes(duration, deadline, retry)


def time_of_first_write(api: Any, clock: GivenClock) -> Callable[[], float]:
    times: list[float] = []

    def note(request: Request) -> None:
        if request.method != "GET":
            times.append(clock.time)

    api.refuse = note
    return lambda: times[0]


def lease_of(holder: str, *, renew_time: str) -> dict[str, Any]:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 10, "renewTime": renew_time}
    return {"metadata": {"name": "op", "namespace": "ns"}, "spec": spec}


async def wait_until(look: Callable[[], bool]) -> None:
    while not look():
        await asyncio.sleep(0)
