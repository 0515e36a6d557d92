"""The engine core in a process of its own, from the side of the API server.

Spawned by an exec, never forked: Ray is initialised in that process and nowhere else. Messages go
over ZeroMQ sockets in a private directory. The child's standard input is a pipe that only this
process holds open, so the child knows when its parent has died, however that happened.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.core_process import FROM_CORE, TO_CORE, Launch
from tpinference_engine.engine.failure import failure_of
from tpinference_engine.engine.link import OnExit, OnMessage
from tpinference_engine.engine.messages import (
    CoreFailed,
    CoreStopped,
    StopCore,
    ToCore,
    encoder,
    from_core_decoder,
)
from tpinference_engine.engine.parts import BuildParts

LAST_WORDS_TIMEOUT_S = 1.0
"""After the child's exit, for messages that it sent before."""
KILL_TIMEOUT_S = 2.0
"""For a killed child to be gone; the kernel may hold one for as long as it likes."""

logger = logging.getLogger(__name__)


class ProcessLink:
    def __init__(
        self,
        config: EngineConfig,
        build: BuildParts,
        max_requests: int,
        on_message: OnMessage,
        on_exit: OnExit,
    ) -> None:
        self._config = config
        self._build = build
        self._max_requests = max_requests
        self._on_message = on_message
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._directory = Path(tempfile.mkdtemp(prefix="tpinference-"))
        self._context = zmq.Context()
        self._to_core = self._context.socket(zmq.PUSH)
        self._from_core = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._bind(self._to_core, TO_CORE)
        self._bind(self._from_core, FROM_CORE)
        self._process = self._spawn()
        self._last_words = asyncio.Event()
        self._receiver = asyncio.create_task(self._receive())
        self._closer: asyncio.Task[None] | None = None
        self._waiter = threading.Thread(
            target=self._wait_for_exit, args=(self._process,), name="engine-core-exit", daemon=True
        )
        self._waiter.start()

    def send(self, message: ToCore) -> None:
        """What can't be sent was for a core that has just died; its exit will be told."""
        self._try_send(message)

    async def close(self, timeout_s: float) -> None:
        if self._process is None:
            return
        if not self._try_send(StopCore()):
            self._process.terminate()  # It has not connected yet, so it has nothing to end.
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            self._process.kill()
            await self._wait_killed(self._process.pid)

    async def _wait_killed(self, pid: int) -> None:
        try:
            await asyncio.wait_for(self._ended.wait(), KILL_TIMEOUT_S)
        except TimeoutError:
            logger.error(
                "engine core process %d is not gone %g s after it was killed", pid, KILL_TIMEOUT_S
            )

    def _try_send(self, message: ToCore) -> bool:
        """The queue holds what open requests can send, and those are bounded."""
        if self._ended.is_set():
            return False
        try:
            self._to_core.send(encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _bind(self, socket: zmq.Socket[Any], name: str) -> None:
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(f"ipc://{self._directory / name}")

    def _spawn(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tpinference_engine.engine.core_process"],
            stdin=subprocess.PIPE,
            # A terminal's Ctrl-C is for this process alone: it drains, then tells the child.
            start_new_session=True,
        )
        launch = Launch(self._config, self._build, self._max_requests, self._directory)
        assert process.stdin is not None, "it was asked for"
        # Should it have died already, its exit code will tell.
        with suppress(BrokenPipeError):
            process.stdin.write(pickle.dumps(launch))
            process.stdin.flush()
        return process

    async def _receive(self) -> None:
        try:
            await self._receive_all()
        # The outermost frame of this task: a core that is not heard is of no use.
        except Exception as error:
            logger.exception("messages of the engine core can't be taken in any more")
            assert self._process is not None, "it was spawned"
            self._process.kill()
            self._on_message(CoreFailed(failure_of(error)))

    async def _receive_all(self) -> None:
        while True:
            message = from_core_decoder.decode(await self._from_core.recv())
            self._on_message(message)
            if isinstance(message, CoreStopped):
                self._last_words.set()

    def _wait_for_exit(self, process: subprocess.Popen[bytes]) -> None:
        exit_code = process.wait()
        self._loop.call_soon_threadsafe(self._begin_end, exit_code)

    def _begin_end(self, exit_code: int) -> None:
        self._closer = asyncio.create_task(self._end(exit_code))

    async def _end(self, exit_code: int) -> None:
        try:
            # There are none if it was killed, or died before it could speak.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._last_words.wait(), LAST_WORDS_TIMEOUT_S)
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
            self._release()
        # The outermost frame of this task: whatever is left over, the exit has to be told.
        except Exception:
            logger.exception("not all of the engine core's process could be cleared away")
        finally:
            self._ended.set()
            self._on_exit(exit_code)

    def _release(self) -> None:
        """Each part, whatever becomes of the others; in reverse."""
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            stack.callback(self._waiter.join)
            stack.callback(self._close_stdin)
            # Not `term`, which would wait for a socket that is still open, for ever.
            stack.callback(self._context.destroy, linger=0)
            stack.callback(self._to_core.close)
            stack.callback(self._from_core.close)

    def _close_stdin(self) -> None:
        assert self._process is not None and self._process.stdin is not None, "it was spawned"
        # A child that died before it had read its launch left a part of that in the buffer.
        with suppress(BrokenPipeError):
            self._process.stdin.close()
