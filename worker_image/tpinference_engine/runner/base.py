"""What a rank runs: the interface between `worker.py` and the mathematics, or its stand-in.

It knows step messages and nothing of transports, actors or requests. A module of its own so that
the worker and the echo runner need no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tpinference_engine.config import EngineConfig
from tpinference_engine.step import StepInput


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What a rank is told once its group is known."""

    rank: int
    store: tuple[str, int] | None
    """Host and port of rank 0's store; None if the rank is alone."""
    address: str
    """This rank's own address, which its peers reach it at."""
    device_index: int
    """Of the accelerator, as the driver numbers it; no meaning on CPU."""
    num_threads: int
    """CPU threads for one operation."""


class PendingTokens(Protocol):
    def wait(self) -> list[int]:
        """The tokens of the step's SAMPLE rows, in order. Raises what the device queue met."""


class Runner(Protocol):
    """One rank's state and device queue. Methods are called one at a time, from any thread."""

    def open_store(self, address: str) -> tuple[str, int]:
        """Rank 0 alone: a store for the group to meet at, kept open until close."""

    def initialize(self, setup: RankSetup) -> None:
        """The rank joins its group. Blocks until all ranks do."""

    def load_model(self) -> int:
        """Reads this rank's slice of the weights; the bytes they take."""

    def cache_capacity(self) -> int:
        """Blocks that fit beside the weights. Raises InsufficientResources."""

    def allocate_cache(self, num_blocks: int) -> None: ...

    def warm_up(self) -> None:
        """Everything that is slow the first time is done once, on all ranks together."""

    def enqueue(self, step: StepInput) -> PendingTokens:
        """Queues SAMPLE, STATE and FORWARD in this order and does not wait for them."""

    def idle(self) -> None:
        """Waits until the device queue is empty. Raises what it met."""

    def close(self) -> None:
        """Ends the queue and leaves the group. Idempotent."""


RunnerFactory = Callable[[EngineConfig], Runner]
