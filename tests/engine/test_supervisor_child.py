"""A child of the supervisor, alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tpinference_engine.supervisor.child import Child


def test_a_child_starts_with_no_signal_blocked_or_ignored() -> None:
    """A shell's background job ignores SIGINT, Python ignores SIGPIPE, and both are inherited."""
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        child = Child("sleeper", ("sleep", "60"), os.environ)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, ignored)
    try:
        lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
    finally:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    masks = dict(line.split(":", 1) for line in lines)
    kept = int(masks["SigIgn"], 16) | int(masks["SigBlk"], 16)
    # Beyond these are the C library's own.
    assert [number.name for number in signal.Signals if kept >> (number - 1) & 1] == []
