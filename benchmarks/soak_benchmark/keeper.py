"""The process that is a place: its own network and mount namespaces, which last as long as it does.

Nothing has a name in the rest of the machine, so nothing has to be removed there. When its standard
input ends, all other processes of the place are killed, each by its pid; then it ends too.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

_POLL_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared-memory-mib", type=int, required=True)
    args = parser.parse_args()
    # Whoever interrupts the benchmark interrupts its main process, which closes this one's input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    size = f"size={args.shared_memory_mib}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", "/dev/shm"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print("ready", flush=True)
    sys.stdin.read()
    end_others()


def end_others() -> None:
    pause = threading.Event()
    while others := processes_beside(os.getpid()):
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # It ended meanwhile.
        pause.wait(_POLL_S)


def processes_beside(keeper_pid: int, processes: Path = Path("/proc")) -> list[int]:
    """All other processes of that place. One that has ended is in no namespace any more."""
    place = _network_of(processes / str(keeper_pid))
    found = (path for path in processes.glob("[0-9]*") if _network_of(path) == place)
    return [int(path.name) for path in found if int(path.name) != keeper_pid]


def _network_of(process: Path) -> str:
    try:
        return os.readlink(process / "ns" / "net")
    except OSError:
        return ""  # It ended meanwhile, and is nobody's.


if __name__ == "__main__":
    main()
