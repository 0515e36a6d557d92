"""Starts the cluster's programs and stops exactly those, even from another run, even after a crash.

Each started process is recorded in the run's own folder with its start time, so that a process
that merely got the same id later is never touched.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from embedded.errors import ProcessEnded

STOP_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 15.0
LOG_TAIL_BYTES = 4000
# Ends a program together with the Python process that started it, however that one ends.
TIED_PREFIX = ("setpriv", "--pdeathsig", "KILL", "--")


@dataclass(frozen=True)
class Record:
    """One started process, as it is written to disk."""

    name: str
    pid: int
    start_ticks: int


@dataclass
class Processes:
    """The processes of one run. `root` holds their records (pids/) and logs (logs/)."""

    root: Path
    # True: the processes end when this one does (tests). False: they outlive it (`up`).
    tied: bool
    _children: set[int] = field(default_factory=set)

    def start(
        self, name: str, argv: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> Record:
        """Starts a program; its output goes to its log. Returns once it was executed."""
        for folder in (self._pids, self._logs):
            folder.mkdir(parents=True, exist_ok=True)
        prefix = TIED_PREFIX if self.tied else ()
        words = [*prefix, *(str(word) for word in argv)]
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        # Not subprocess.Popen: it complains of processes that outlive it, as these are meant to.
        pid = os.posix_spawnp(
            words[0],
            words,
            {**os.environ, **(env or {})},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self.log_file(name)), append, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        self._children.add(pid)
        record = Record(name, pid, read_start_ticks(pid) or 0)
        self._record_file(name).write_text(json.dumps(asdict(record)))
        return record

    def is_running(self, name: str) -> bool:
        record = self.find(name)
        return record is not None and self._is_alive(record)

    def check_running(self, name: str) -> None:
        if not self.is_running(name):
            raise ProcessEnded(f"{name} has ended; its log ends in:\n{self.log_tail(name)}")

    def find(self, name: str) -> Record | None:
        try:
            return Record(**json.loads(self._record_file(name).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def names(self) -> list[str]:
        """The recorded names, the most recently started first."""
        files = sorted(self._pids.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        return [file.stem for file in reversed(files)]

    def stop(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends one process (SIGTERM, then SIGKILL) and forgets it. Fine if it has ended before."""
        record = self.find(name)
        if record is not None:
            for signal_number, limit_s in (
                (signal.SIGTERM, timeout_s),
                (signal.SIGKILL, KILL_TIMEOUT_S),
            ):
                if self._end(record, signal_number, limit_s):
                    break
            else:
                raise ProcessEnded(f"{name} (process {record.pid}) does not end after SIGKILL")
        self._record_file(name).unlink(missing_ok=True)

    def kill(self, name: str) -> None:
        """Ends one process as a crash would."""
        self.stop(name, timeout_s=0)

    def stop_all(self) -> None:
        for name in self.names():
            self.stop(name)

    def log_file(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def log_tail(self, name: str) -> str:
        try:
            return self.log_file(name).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return "(no log)"

    def _end(self, record: Record, signal_number: signal.Signals, timeout_s: float) -> bool:
        if not self._is_alive(record):
            return True
        if timeout_s == 0:
            return False
        os.kill(record.pid, signal_number)
        deadline = time.monotonic() + timeout_s
        while self._is_alive(record):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _is_alive(self, record: Record) -> bool:
        alive = read_start_ticks(record.pid) == record.start_ticks
        if not alive and record.pid in self._children:
            self._reap(record.pid)
        return alive

    def _reap(self, pid: int) -> None:
        """Frees the id of a child that has ended; another's child is freed by its own parent."""
        ended, _ = os.waitpid(pid, os.WNOHANG)
        if ended:
            self._children.discard(pid)

    def _record_file(self, name: str) -> Path:
        return self._pids / f"{name}.json"

    @property
    def _pids(self) -> Path:
        return self.root / "pids"

    @property
    def _logs(self) -> Path:
        return self.root / "logs"


def read_start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold anything.
    fields = text.rpartition(")")[2].split()
    state, start_ticks = fields[0], fields[19]
    return None if state in ("Z", "X") else int(start_ticks)
