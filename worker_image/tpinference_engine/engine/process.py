"""The engine core in a process of its own, from the side of the API server.

Spawned by an exec, never forked: Ray is initialised in that process and nowhere else. Messages go
over ZeroMQ sockets in a private directory. The child's standard input is a pipe that only this
process holds open, so the child knows when its parent has died, however that happened.
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.core_process import FROM_CORE, TO_CORE, Launch
from tpinference_engine.engine.link import OnExit, OnMessage
from tpinference_engine.engine.messages import (
    CoreStopped,
    StopCore,
    ToCore,
    encoder,
    from_core_decoder,
)
from tpinference_engine.engine.parts import BuildParts

LAST_WORDS_TIMEOUT_S = 1.0
"""After the child's exit, for messages that it sent before."""


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
            await self._ended.wait()

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
        # There are none if it was killed, or died before it could speak.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._last_words.wait(), LAST_WORDS_TIMEOUT_S)
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._from_core.close()
        self._to_core.close()
        self._context.term()
        assert self._process is not None and self._process.stdin is not None, "it was spawned"
        self._process.stdin.close()
        self._waiter.join()
        shutil.rmtree(self._directory)
        self._ended.set()
        self._on_exit(exit_code)
