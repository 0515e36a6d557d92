"""What processes and shared memory hold, and whether it grows from round to round.

A round has every profile once. The first one warms up; the second is compared with the last.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MIB = 2**20

Holding = Mapping[str, float]
"""Amounts by name, of one process or place."""

MAX_GROWTH: Holding = {
    "memory MiB": 8.0,
    "threads": 2.0,
    "fds": 4.0,
    "/dev/shm MiB": 0.5,
    "/dev/shm names": 0.0,
}
"""From the second round to the last. Of memory, what the process does not share."""


@dataclass(frozen=True, slots=True)
class Sample:
    round: int
    held: Mapping[str, Holding]
    """By who holds it."""


@dataclass(frozen=True, slots=True)
class Growth:
    owner: str
    what: str
    early: float
    late: float

    @property
    def holds(self) -> bool:
        return self.late - self.early <= MAX_GROWTH[self.what]


def observe_process(pid: int, processes: Path = Path("/proc")) -> Holding:
    """Empty if it has ended."""
    folder = processes / str(pid)
    try:
        lines = (folder / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        if "RssAnon" not in fields:
            return {}  # It has ended, and nobody has asked how.
        return {
            "memory MiB": int(fields["RssAnon"].split()[0]) / 1024,
            "threads": float(fields["Threads"]),
            "fds": float(len(os.listdir(folder / "fd"))),
        }
    except (FileNotFoundError, ProcessLookupError):
        return {}


def observe_shared_memory(folder: Path) -> Holding:
    """Of a place that has one of its own."""
    system = os.statvfs(folder)
    used = (system.f_blocks - system.f_bfree) * system.f_frsize
    return {"/dev/shm MiB": used / _MIB, "/dev/shm names": float(len(os.listdir(folder)))}


def find_growth(samples: Sequence[Sample], last_round: int) -> tuple[Growth, ...]:
    """Nothing, unless there are a second round and a later one."""
    early = [sample for sample in samples if sample.round == 1]
    late = [sample for sample in samples if sample.round == last_round]
    if not early or not late or last_round < 2:
        return ()
    return tuple(
        Growth(owner, what, _middle(early, owner, what), _middle(late, owner, what))
        for owner, what in _amounts(late[-1])
    )


def _amounts(sample: Sample) -> Iterator[tuple[str, str]]:
    for owner, held in sample.held.items():
        yield from ((owner, what) for what in held)


def _middle(samples: Sequence[Sample], owner: str, what: str) -> float:
    return statistics.median(
        sample.held[owner][what] for sample in samples if what in sample.held.get(owner, {})
    )


class Watcher:
    """Of processes by role and of shared memory by place."""

    def __init__(self, folders: Mapping[str, Path], now_s: Callable[[], float]) -> None:
        self._folders = folders
        self._now_s = now_s
        self._pids: dict[str, int] = {}
        self.ended_s: dict[str, float] = {}
        """When each process that is gone was missed."""
        self.samples: list[Sample] = []

    def watch(self, pids: Mapping[str, int]) -> None:
        self._pids |= pids

    def sample(self, round: int) -> Sample:
        held = {role: observe_process(pid) for role, pid in self._pids.items()}
        held |= {name: observe_shared_memory(path) for name, path in self._folders.items()}
        self.samples.append(Sample(round, held))
        return self.samples[-1]

    def look_for_ends(self) -> None:
        for role, pid in self._pids.items():
            if role not in self.ended_s and not observe_process(pid):
                self.ended_s[role] = self._now_s()
