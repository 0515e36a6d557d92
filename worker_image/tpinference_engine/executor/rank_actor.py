"""The Ray actor around one rank's worker.

Two-phase: the constructor is cheap and can't fail, so that placement is known, and an error of the
model comes back as itself, not as a death. Calls come on the actor's main thread, `step` of a
compiled graph on a thread of Ray's; never both at once, as the driver fences. A parked graph thread
waits in its `step`, and then steps come as calls.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from tpinference_engine.config import EngineConfig
from tpinference_engine.executor.lifeline import LifelineAddress, hold_lifeline
from tpinference_engine.executor.network_interface import choose_interface
from tpinference_engine.executor.placement import PlacedActor
from tpinference_engine.executor.semaphores import (
    graph_semaphores,
    sweep_dead_semaphores,
    unlink_semaphores,
)
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.transport.base import PARK
from tpinference_engine.worker import Worker


class RankActor:
    def __init__(self, config: EngineConfig, runner_factory: RunnerFactory | None) -> None:
        self._config = config
        self._runner_factory = runner_factory
        self._worker: Worker | None = None
        self._semaphores_before: frozenset[str] = frozenset()
        # Counts, so that a wake-up that overtakes its PARK is not lost.
        self._wake_ups = threading.Semaphore(0)

    def place(self) -> PlacedActor:
        found = self._the_worker.place()
        return PlacedActor(
            pod=str(found["pod"]),
            node_id=str(found["node"]),
            # A rank's own pod says this, and only here can it be read.
            node=os.environ.get("TPINFERENCE_NODE_NAME") or str(found["node"]),
            address=str(found["address"]),
            device=str(found["device"]),
            pid=int(found["pid"]),
        )

    def join(self, rank: int, lifeline: LifelineAddress) -> None:
        """From here on this process ends with the engine core."""
        hold_lifeline(lifeline, rank)
        choose_interface(str(self._the_worker.place()["address"]))
        sweep_dead_semaphores()

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        worker = self._the_worker
        with worker.naming_errors():
            return getattr(worker, method)(*args)

    def step(self, payload: bytes) -> bytes:
        if payload == PARK:
            self._wake_ups.acquire()
            return PARK
        return self._the_worker.step(payload)

    def unpark(self) -> None:
        self._wake_ups.release()

    def prepare_graph(self, max_output_bytes: int) -> None:
        from tpinference_engine.transport.compiled_graph import (
            set_channel_bytes,
            set_graph_device,
        )

        set_channel_bytes(max_output_bytes)
        if self._config.device == "cuda":
            set_graph_device(str(self._the_worker.place()["device"]))
        self._semaphores_before = graph_semaphores(os.getppid())

    def unlink_graph_semaphores(self) -> None:
        """After the first step: all that need the graph's semaphores have them open."""
        raylet_pid = os.getppid()
        unlink_semaphores(graph_semaphores(raylet_pid) - self._semaphores_before)

    @property
    def _the_worker(self) -> Worker:
        if self._worker is None:
            self._worker = Worker(self._config, self._runner_factory)
        return self._worker
