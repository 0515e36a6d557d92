"""A rank as a process of this machine: calls over a pipe on its main thread, steps on another.

The same two threads as an actor has under Ray, and the same fence between them.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection, wait
from typing import Any

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import TPInferenceError
from tpinference_engine.executor.lifeline import EXIT_CODE_ALONE
from tpinference_engine.executor.network_interface import choose_interface
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.transport.shared_memory import RankSlots, answer_steps
from tpinference_engine.worker import LOOPBACK, Worker

Answer = tuple[bool, Any]
"""Whether it succeeded, and the value or the error."""


def run_rank(
    rank: int,
    config: EngineConfig,
    runner_factory: RunnerFactory | None,
    slots: RankSlots,
    calls: Connection,
) -> None:
    """Main of the process. It ends by being killed, or with the engine core."""
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    choose_interface(LOOPBACK)
    try:
        worker = Worker(config, runner_factory, device_index=rank)
    except TPInferenceError as error:
        calls.recv()
        calls.send((False, error))
        return
    threading.Thread(
        target=answer_steps,
        args=(slots, worker.step, lambda error: calls.send((False, worker.rank_error(error)))),
        name="steps",
        daemon=True,
    ).start()
    while True:
        method, args = calls.recv()
        calls.send(_call(worker, method, args))


def _call(worker: Worker, method: str, args: tuple[Any, ...]) -> Answer:
    try:
        return True, getattr(worker, method)(*args)
    # The outermost frame of a rank's call: whatever it met belongs to the driver.
    except Exception as error:
        return False, worker.rank_error(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by multiprocessing"
    wait([parent.sentinel])
    os._exit(EXIT_CODE_ALONE)
