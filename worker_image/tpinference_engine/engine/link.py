"""How the asyncio side reaches an engine core: a process of its own, or a thread for tests.

Both carry the same messages. They do not know what the messages mean, but for the end of it all.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.core import EngineCore
from tpinference_engine.engine.messages import FromCore, StopCore, ToCore
from tpinference_engine.engine.parts import BuildParts


class CoreLink(Protocol):
    async def open(self) -> None:
        """Starts the core; what it says comes to the callbacks, on the event loop."""

    def send(self, message: ToCore) -> None:
        """Does not wait. After the core has ended it does nothing."""

    async def close(self, timeout_s: float) -> None:
        """Stops the core, by force after `timeout_s`. Nothing of it is left then. Idempotent."""


OnMessage = Callable[[FromCore], None]
OnExit = Callable[[int], None]
"""The core has ended, with this exit code; no message comes after it."""


class ThreadLink:
    """The core in a thread of this process."""

    def __init__(
        self,
        config: EngineConfig,
        build: BuildParts,
        max_requests: int,
        on_message: OnMessage,
        on_exit: OnExit,
    ) -> None:
        self._inbox: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
        self._on_message = on_message
        self._on_exit = on_exit
        self._ended = asyncio.Event()
        self._core = EngineCore(
            config, build, max_requests=max_requests, inbox=self._inbox, emit=self._emit
        )
        self._thread = threading.Thread(target=self._run, name="engine-core")

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def send(self, message: ToCore) -> None:
        self._inbox.put(message)

    async def close(self, timeout_s: float) -> None:
        """A thread can't be forced: `timeout_s` bounds the wait, then TimeoutError says so."""
        if self._thread.ident is None:
            return
        self._inbox.put(StopCore())
        await asyncio.wait_for(self._ended.wait(), timeout_s)
        self._thread.join()

    def _run(self) -> None:
        exit_code = 0 if self._core.run() else 1
        self._loop.call_soon_threadsafe(self._end, exit_code)

    def _end(self, exit_code: int) -> None:
        self._on_exit(exit_code)
        self._ended.set()

    def _emit(self, message: FromCore) -> None:
        self._loop.call_soon_threadsafe(self._on_message, message)
