"""The device queue: order, failure, and what belongs to its thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tpinference_engine.errors import GroupFailed, InsufficientResources, MessageCorrupt
from tpinference_engine.runner.device_queue import ThreadQueue, run


@pytest.fixture
def queue() -> Iterator[ThreadQueue]:
    queue = ThreadQueue(num_threads=1)
    yield queue
    queue.close()


def test_submitting_does_not_wait_and_keeps_the_order(queue: ThreadQueue) -> None:
    gate, seen = threading.Event(), list[int]()

    def wait_at_the_gate() -> None:
        gate.wait()

    queue.submit(wait_at_the_gate)
    tickets = [queue.submit(partial(seen.append, number)) for number in range(5)]
    assert seen == []
    gate.set()
    tickets[2].wait()
    assert seen[:3] == [0, 1, 2]
    tickets[4].wait()
    assert seen == [0, 1, 2, 3, 4]


def test_work_runs_in_inference_mode_with_the_ranks_threads(queue: ThreadQueue) -> None:
    mode, threads = run(queue, lambda: (torch.is_inference_mode_enabled(), torch.get_num_threads()))
    assert (mode, threads) == (True, 1)
    assert not torch.is_inference_mode_enabled()


def test_failure_ends_the_queue(queue: ThreadQueue) -> None:
    seen = list[int]()
    failed = queue.submit(lambda: [][0])
    later = queue.submit(lambda: seen.append(1))
    for ticket in (later, failed, queue.submit(lambda: seen.append(2))):
        with pytest.raises(GroupFailed, match="device queue failed: IndexError: list index"):
            ticket.wait()
    assert seen == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MessageCorrupt("broken"), MessageCorrupt),
        (torch.OutOfMemoryError("tried to allocate"), InsufficientResources),
        (RuntimeError("connection closed"), GroupFailed),
    ],
    ids=["one of ours", "out of memory", "any other"],
)
def test_failures_are_of_the_engines_tree(
    queue: ThreadQueue, error: Exception, expected: type[Exception]
) -> None:
    def work() -> None:
        raise error

    with pytest.raises(expected, match=str(error)):
        run(queue, work)


@pytest.mark.parametrize("met", [MessageCorrupt("broken"), RuntimeError("broken")])
def test_an_error_is_never_its_own_cause(queue: ThreadQueue, met: Exception) -> None:
    """Else whoever walks along the causes never ends, as a rank did with a damaged model."""

    def fail() -> None:
        raise met

    ticket = queue.submit(fail)
    with pytest.raises((MessageCorrupt, GroupFailed)) as caught:
        ticket.wait()
    causes = set[int]()
    error: BaseException | None = caught.value
    while error is not None:
        assert id(error) not in causes
        causes.add(id(error))
        error = error.__cause__
