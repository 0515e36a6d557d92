"""Main of the engine core's process: the loop on the main thread, two threads for its messages.

Signals only set state. SIGINT is the parent's business; SIGTERM asks the loop to end. When the
parent dies, standard input ends: the loop is asked to end then too, and forced to if it can't.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import zmq

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.core import EngineCore
from tpinference_engine.engine.messages import (
    FromCore,
    StopCore,
    ToCore,
    encoder,
    to_core_decoder,
)
from tpinference_engine.engine.parts import BuildParts

ORPHAN_GRACE_S = 3.0
"""After the parent is dead or can't be spoken to, for the loop to end; ranks end with this process
at the latest."""
LINGER_MS = 1000
"""For the last messages to leave."""
SWITCH_INTERVAL_S = 0.0005
"""The loop gets the interpreter back from the message threads within this time."""

TO_CORE = "to-core"
FROM_CORE = "from-core"
"""Names of the sockets in the launch's directory."""

logger = logging.getLogger(__name__)

Inbox = queue.SimpleQueue[ToCore]
Outbox = queue.SimpleQueue[FromCore | None]


class _Messaging:
    """Runs the threads of the messages. A core that is deaf or mute is of no use: it ends."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.has_failed = False

    def start(self, name: str, target: Callable[..., None], *args: object) -> threading.Thread:
        def run() -> None:
            try:
                target(*args)
            # The outermost frame of the thread.
            except Exception:
                logger.exception("%s can't go on, the engine core ends", name)
                self._end()

        thread = threading.Thread(target=run, name=name)
        thread.start()
        return thread

    def _end(self) -> None:
        self.has_failed = True
        self._inbox.put(StopCore())
        force = threading.Timer(ORPHAN_GRACE_S, _exit_at_once)
        force.daemon = True
        force.start()


@dataclass(frozen=True, slots=True)
class Launch:
    """What the parent writes to standard input, pickled: both are the same program."""

    config: EngineConfig
    build: BuildParts
    max_requests: int
    directory: Path
    """Of the sockets."""


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox: Inbox = queue.SimpleQueue()
    outbox: Outbox = queue.SimpleQueue()
    _stop_on_sigterm(inbox)
    parent = _take_stdin()
    launch: Launch = pickle.load(parent)
    threading.Thread(
        target=_watch, args=(parent, launch.directory, inbox), name="parent-watch", daemon=True
    ).start()
    context = zmq.Context()
    messaging = _Messaging(inbox)
    sender = messaging.start("core-sender", _send_all, context, launch.directory, outbox)
    receiver = messaging.start("core-receiver", _receive_all, context, launch.directory, inbox)
    core = EngineCore(
        launch.config,
        launch.build,
        max_requests=launch.max_requests,
        inbox=inbox,
        emit=outbox.put,
    )
    succeeded = core.run(on_started=lambda: _settle(inbox))
    outbox.put(None)
    sender.join()
    context.term()  # Ends the receiver's wait.
    receiver.join()
    return 0 if succeeded and not messaging.has_failed else 1


def _take_stdin() -> BinaryIO:
    """The pipe from the parent, out of the way of anything that is started here."""
    parent = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return parent


def _watch(parent: BinaryIO, directory: Path, inbox: Inbox) -> None:
    """Nothing more is ever written to the pipe: a read returns when the parent is dead."""
    parent.read(1)
    inbox.put(StopCore())
    shutil.rmtree(directory, ignore_errors=True)  # Its maker can't any more.
    time.sleep(ORPHAN_GRACE_S)
    _exit_at_once()


def _exit_at_once() -> None:
    logger.error("the loop did not end in %g s", ORPHAN_GRACE_S)
    os._exit(1)


def _send_all(context: zmq.Context[zmq.Socket[bytes]], directory: Path, outbox: Outbox) -> None:
    """The queue grows by accepted tokens alone, which open requests bound."""
    with context.socket(zmq.PUSH) as socket:
        socket.linger = LINGER_MS
        socket.connect(f"ipc://{directory / FROM_CORE}")
        while (message := outbox.get()) is not None:
            socket.send(encoder.encode(message))


def _receive_all(context: zmq.Context[zmq.Socket[bytes]], directory: Path, inbox: Inbox) -> None:
    with context.socket(zmq.PULL) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{directory / TO_CORE}")
        while True:
            try:
                inbox.put(to_core_decoder.decode(socket.recv()))
            except zmq.ContextTerminated:
                return


def _stop_on_sigterm(inbox: Inbox) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        inbox.put(StopCore())  # SimpleQueue.put is reentrant, so a handler may call it.

    signal.signal(signal.SIGTERM, stop)


def _settle(inbox: Inbox) -> None:
    """After the start: what it made lives as long as the process, and ray.init took SIGTERM."""
    _stop_on_sigterm(inbox)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


if __name__ == "__main__":
    sys.exit(main())
