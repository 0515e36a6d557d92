"""SIGTERM and SIGINT as two events: the first asks for an end, the second for it at once.

Handlers only set state. A request to drain is no signal: it keeps the process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.urged = asyncio.Event()

    def receive(self) -> None:
        (self.urged if self.asked.is_set() else self.asked).set()


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Holds the signals of this process while inside, on the running loop."""
    stop = StopSignals()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.receive)
    try:
        yield stop
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
