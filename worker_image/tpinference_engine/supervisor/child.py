"""A child process of the supervisor, in a process group of its own.

Not `subprocess`: as process 1 the supervisor reaps whatever is orphaned, in one place, and
`subprocess` wants to reap its own.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence

from tpinference_engine.exit_code import signal_name

logger = logging.getLogger(__name__)


class Child:
    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name = name
        self.exit_code: int | None = None
        """None while it runs; negative = the signal that ended it."""
        self.pid = os.posix_spawnp(
            command[0],
            list(command),
            dict(environ),
            setpgroup=0,
            # Whatever this process blocks or ignores, or was started with.
            setsigmask=(),
            setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        )

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def note_end(self, wait_status: int) -> None:
        self.exit_code = os.waitstatus_to_exitcode(wait_status)
        logger.info("%s (pid %d) %s", self.name, self.pid, self.describe_end())

    def describe_end(self) -> str:
        code = self.exit_code
        if code is None:
            return "is running"
        return f"ended with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"

    def send(self, number: signal.Signals) -> None:
        """To the process alone: what it started is its own to end."""
        if self.running:
            logger.info("sending %s to %s (pid %d)", number.name, self.name, self.pid)
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        if self.running:
            logger.warning("killing %s (pid %d) and its group", self.name, self.pid)
            os.killpg(self.pid, signal.SIGKILL)


def reap(children: Sequence[Child]) -> None:
    """Takes in every process that has ended, orphans too, and never waits."""
    by_pid = {child.pid: child for child in children}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in by_pid:
            by_pid[pid].note_end(status)
