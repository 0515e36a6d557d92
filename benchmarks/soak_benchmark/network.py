"""Two places with a network of our own between them: what Ray takes for two machines.

A place has its own network, /dev/shm and folder for Ray, as a pod has. It does not know what runs
in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from soak_benchmark.keeper import processes_beside
from soak_benchmark.link import Profile

HEAD_ADDRESS = "192.0.2.1"
RANKS_ADDRESS = "192.0.2.2"
"""Of a range for documentation, and seen in these namespaces only."""

_SHARED_MEMORY_MIB = 1024
_END_S = 30.0
_PACKAGES = str(Path(__file__).resolve().parents[1])


def environment() -> dict[str, str]:
    """This process's, in which a child finds this package."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [_PACKAGES, known]))}


class Place:
    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.folder = folder
        """For Ray. The place sees the rest of the disk, too."""
        folder.mkdir()
        self._keeper = _start(
            ["unshare", "--net", "--mount", sys.executable, "-m", "soak_benchmark.keeper"]
            + [f"--shared-memory-mib={_SHARED_MEMORY_MIB}"]
        )
        _read_line(self._keeper)

    @property
    def shared_memory(self) -> Path:
        return Path(f"/proc/{self._keeper.pid}/root/dev/shm")

    @property
    def pids(self) -> list[int]:
        return processes_beside(self._keeper.pid)

    def command(self, command: Sequence[str]) -> list[str]:
        """`command`, to be run inside; it keeps its pid."""
        spaces = f"/proc/{self._keeper.pid}/ns"
        return ["nsenter", f"--net={spaces}/net", f"--mount={spaces}/mnt", "--", *command]

    def connect(self, device: str, peer: str) -> None:
        _run(["ip", "link", "set", device, "netns", str(self._keeper.pid)])
        for line in (
            f"ip addr add {self.address} peer {peer} dev {device}",
            f"ip link set {device} up",
            # Ray asks which address leads out, to find its own.
            f"ip route add default dev {device}",
        ):
            _run(self.command(line.split()))

    def close(self) -> None:
        _end(self._keeper)


class Network:
    """`with Network(seed) as network:`; whatever ran in it is gone afterwards."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._stack = ExitStack()

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            # Short, as sockets lie below it.
            parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
            # Unique for the moment in which they are not in their places yet.
            devices = [f"soak{os.getpid()}h", f"soak{os.getpid()}r"]
            seed = f"--seed={self._seed}"
            relay = [sys.executable, "-m", "soak_benchmark.relay", *devices, seed]
            self._relay = _start(relay)
            stack.callback(_end, self._relay)
            _read_line(self._relay)
            self.head = Place(HEAD_ADDRESS, parent / "head")
            stack.callback(self.head.close)
            self.ranks = Place(RANKS_ADDRESS, parent / "ranks")
            stack.callback(self.ranks.close)
            self.head.connect(devices[0], RANKS_ADDRESS)
            self.ranks.connect(devices[1], HEAD_ADDRESS)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def relay_pid(self) -> int:
        return self._relay.pid

    def change(self, profile: Profile) -> dict[str, int]:
        """From here on links are like `profile`. The fates of packets under the one before."""
        assert self._relay.stdin is not None, "a pipe was asked for"
        self._relay.stdin.write(json.dumps(asdict(profile)) + "\n")
        self._relay.stdin.flush()
        return dict(json.loads(_read_line(self._relay)))


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Of its own, so that an interrupt from the terminal reaches the main process alone.
        start_new_session=True,
    )


def _read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None, "a pipe was asked for"
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended, exit code {process.wait(_END_S)}")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None, "pipes were asked for"
    process.stdin.close()
    process.wait(_END_S)
    process.stdout.close()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)
