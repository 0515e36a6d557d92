"""What a driver process says to the main one: events, a line of JSON each, on its standard output.

`started` (pids by role), `phase` (and it waits until the network has changed), `progress` and
`passed` (with `total` steps and `wrong` tokens so far), `wrong`, `failed`, `ended`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from typing import Any


class Reports:
    def __init__(self) -> None:
        """From here on other prints go to standard error: Ray's are of what ranks print."""
        faulthandler.enable()
        self._output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._sent_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._sent_s

    def send(self, event: str, **facts: Any) -> None:
        self._output.write(json.dumps({"event": event, **facts}, default=repr) + "\n")
        self._output.flush()
        self._sent_s = time.monotonic()

    def wait_for_network(self, phase: int) -> None:
        self.send("phase", number=phase)
        sys.stdin.readline()
