"""A rank's one queue of device work: a CUDA stream, or on CPU a thread that stands for one.

Work is carried out in the order it was submitted and the submitter does not wait for it, so a CPU
shows the same races as an accelerator. All work runs in inference mode with the device selected,
whatever thread submits it. After a failure nothing more runs: every later wait raises that failure.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from tpinference_engine.errors import (
    GroupFailed,
    InsufficientResources,
    TPInferenceError,
    cause_for,
)

T = TypeVar("T")
Work = Callable[[], None]


class Ticket(Protocol):
    def wait(self) -> None:
        """Until the work is done. Raises what it, or any before it, met."""


class DeviceQueue(Protocol):
    @property
    def device(self) -> torch.device: ...

    def submit(self, work: Work) -> Ticket: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class QueuedTokens:
    """What a sample in the queue gives, in the host's memory once its ticket has passed."""

    ticket: Ticket
    host: torch.Tensor

    def wait(self) -> list[int]:
        self.ticket.wait()
        tokens: list[int] = self.host.tolist()
        return tokens


def make_queue(device: torch.device, num_threads: int) -> DeviceQueue:
    return StreamQueue(device) if device.type == "cuda" else ThreadQueue(num_threads)


def run(queue: DeviceQueue, work: Callable[[], T]) -> T:
    """`work` through the queue, and its result once it is done."""
    results: list[T] = []
    queue.submit(lambda: results.append(work())).wait()
    return results[0]


class _Failure:
    """Remembers the first error of a queue."""

    def __init__(self) -> None:
        self._error: TPInferenceError | None = None

    def guard(self, work: Work) -> None:
        self.check()
        try:
            work()
        except Exception as error:
            self._error = _translate(error)
            raise self._error from cause_for(self._error, error)

    def check(self) -> None:
        if self._error is not None:
            raise self._error


def _translate(error: Exception) -> TPInferenceError:
    if isinstance(error, TPInferenceError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return InsufficientResources(f"device memory is used up: {error}")
    return GroupFailed(f"device queue failed: {type(error).__name__}: {error}")


class ThreadQueue:
    """On CPU. torch's thread count and inference mode belong to a thread, so they are set in it."""

    def __init__(self, num_threads: int) -> None:
        self._failure = _Failure()
        self._executor = ThreadPoolExecutor(
            1,
            thread_name_prefix="device-queue",
            initializer=torch.set_num_threads,
            initargs=(num_threads,),
        )

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def submit(self, work: Work) -> Ticket:
        return _FutureTicket(self._executor.submit(self._carry_out, work))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _carry_out(self, work: Work) -> None:
        with torch.inference_mode():
            self._failure.guard(work)


class _FutureTicket:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class StreamQueue:
    """On CUDA: the submitter's thread launches, the stream carries out."""

    def __init__(self, device: torch.device) -> None:
        self._failure = _Failure()
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        return self._device

    def submit(self, work: Work) -> Ticket:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with (
            torch.inference_mode(),
            torch.cuda.device(self._device),
            torch.cuda.stream(self._stream),
        ):
            try:
                self._failure.guard(work)
            except TPInferenceError:
                # As on CPU, submitting does not raise; the next wait does.
                return _EventTicket(event, self._failure)
            event.record(self._stream)
        return _EventTicket(event, self._failure)

    def close(self) -> None:
        """The stream ends with the process; there is nothing to stop."""


class _EventTicket:
    def __init__(self, event: torch.cuda.Event, failure: _Failure) -> None:
        self._event = event
        self._failure = failure

    def wait(self) -> None:
        self._failure.check()
        self._failure.guard(self._event.synchronize)
