"""Steps between processes of one machine: a slot of shared memory each way, a semaphore to wake by.

One call is in flight at most, so a slot is never written before its readers have answered: no ring
and no lock is needed, and the semaphores order memory between cores. Nobody spins.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Semaphore
from typing import Any

from tpinference_engine.errors import MessageCorrupt, StepTimedOut

_HEADER = struct.Struct("<II")
_ANSWERED, _FAILED = 0, 1
_POLL_S = 0.02
"""How soon a rank that died or failed is noticed in a step."""


class Slot:
    """One message at a time, in memory that several processes map."""

    def __init__(self, memory: SharedMemory) -> None:
        assert memory.buf is not None, "mapped until it is closed"
        self._memory = memory
        self._buffer: memoryview = memory.buf

    @classmethod
    def create(cls, capacity: int) -> Slot:
        return cls(SharedMemory(create=True, size=_HEADER.size + capacity))

    @classmethod
    def attach(cls, name: str) -> Slot:
        return cls(SharedMemory(name=name))

    @property
    def name(self) -> str:
        return self._memory.name

    def write(self, payload: bytes, kind: int = _ANSWERED) -> None:
        end = _HEADER.size + len(payload)
        if end > self._memory.size:
            raise MessageCorrupt(
                f"message has {len(payload)} bytes, "
                f"its slot holds {self._memory.size - _HEADER.size}"
            )
        self._buffer[_HEADER.size : end] = payload
        _HEADER.pack_into(self._buffer, 0, kind, len(payload))

    def read(self) -> tuple[int, bytes]:
        kind, length = _HEADER.unpack_from(self._buffer, 0)
        return kind, bytes(self._buffer[_HEADER.size : _HEADER.size + length])

    def close(self, *, unlink: bool) -> None:
        self._memory.close()
        if unlink:
            self._memory.unlink()


@dataclass(frozen=True, slots=True)
class RankSlots:
    """What a rank's process is started with."""

    input_name: str
    output_name: str
    asked: Semaphore
    answered: Semaphore


class SharedMemoryTransport:
    def __init__(
        self,
        context: SpawnContext,
        num_ranks: int,
        *,
        max_input_bytes: int,
        max_output_bytes: int,
    ) -> None:
        self._input = Slot.create(max_input_bytes)
        self._outputs = [Slot.create(max_output_bytes) for _ in range(num_ranks)]
        self._asked = [context.Semaphore(0) for _ in range(num_ranks)]
        self._answered = [context.Semaphore(0) for _ in range(num_ranks)]
        self._closed = False
        self.check_rank: Callable[[int], None] = lambda rank: None
        """Raises if `rank` can't answer any more."""
        self.raise_failure: Callable[[int], None] = lambda rank: None
        """Raises what `rank` met in its step."""

    def slots_of(self, rank: int) -> RankSlots:
        return RankSlots(
            self._input.name, self._outputs[rank].name, self._asked[rank], self._answered[rank]
        )

    def submit(self, payload: bytes) -> None:
        self._input.write(payload)
        for asked in self._asked:
            asked.release()

    def result(self, timeout_s: float) -> list[bytes]:
        end = time.monotonic() + timeout_s
        answers: dict[int, bytes] = {}
        while len(answers) < len(self._outputs):
            late = [rank for rank in range(len(self._outputs)) if rank not in answers]
            answered = self._wait_for_any(late)
            answers |= {rank: self._take(rank) for rank in answered}
            if answered:
                continue
            for rank in range(len(self._outputs)):
                self.check_rank(rank)
            if time.monotonic() > end:
                raise StepTimedOut.without(late, "a step", timeout_s)
        return [answers[rank] for rank in range(len(self._outputs))]

    def watched_refs(self) -> list[Any]:
        return []

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for slot in (self._input, *self._outputs):
            slot.close(unlink=True)

    def _wait_for_any(self, ranks: list[int]) -> list[int]:
        """Those that have answered. It sleeps on one only, and looks at all in each turn: that one
        may wait for another, which failed or died, for good."""
        first, *others = ranks
        answered = [first] if self._answered[first].acquire(timeout=_POLL_S) else []
        return answered + [rank for rank in others if self._answered[rank].acquire(block=False)]

    def _take(self, rank: int) -> bytes:
        kind, payload = self._outputs[rank].read()
        if kind == _FAILED:
            self.raise_failure(rank)
        return payload


def answer_steps(
    slots: RankSlots, step: Callable[[bytes], bytes], report: Callable[[Exception], None]
) -> None:
    """The rank's side: answers for good. An error goes to `report`, then its mark to the driver."""
    asked_in, answer_in = Slot.attach(slots.input_name), Slot.attach(slots.output_name)
    while True:
        slots.asked.acquire()
        _, payload = asked_in.read()
        try:
            answer_in.write(step(payload))
        # The outermost frame of a rank's step: whatever it met belongs to the driver.
        except Exception as error:
            report(error)
            answer_in.write(b"", _FAILED)
        slots.answered.release()
