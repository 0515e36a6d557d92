"""Named semaphores in /dev/shm: what a compiled graph makes there, and what dead raylets left.

Ray names two per channel after the raylet's pid and unlinks them only in a clean end. A memory
volume outlives container restarts, so a crash loop would fill it. Every process has opened them by
the first finished step; from then on the names serve nobody. Only names of this pid namespace are
touched.
"""

from __future__ import annotations

import re
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"sem\.(?:hdr|obj)(?P<pid>\d+)-\d+")
_RAYLET_SOCKET_FLAG = b"--raylet_socket_name="


def graph_semaphores(raylet_pid: int, folder: Path = SHARED_MEMORY) -> frozenset[str]:
    """Names that this raylet's channels have there now."""
    return frozenset(name for name, pid in _entries(folder) if pid == raylet_pid)


def unlink_semaphores(names: frozenset[str], folder: Path = SHARED_MEMORY) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def sweep_dead_semaphores(folder: Path = SHARED_MEMORY, processes: Path = Path("/proc")) -> int:
    """Unlinks those of raylets that have ended; how many."""
    dead = [name for name, pid in _entries(folder) if not (processes / str(pid)).exists()]
    unlink_semaphores(frozenset(dead), folder)
    return len(dead)


def find_raylet_pid(raylet_socket: str, processes: Path = Path("/proc")) -> int | None:
    """The raylet that listens on `raylet_socket`, if it is in this pid namespace."""
    wanted = _RAYLET_SOCKET_FLAG + raylet_socket.encode()
    for command in processes.glob("[0-9]*/cmdline"):
        try:
            arguments = command.read_bytes().split(b"\0")
        except OSError:
            continue  # It ended meanwhile.
        if wanted in arguments and arguments[0].endswith(b"raylet"):
            return int(command.parent.name)
    return None


def _entries(folder: Path) -> list[tuple[str, int]]:
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return [(match.group(), int(match["pid"])) for match in matches if match]
