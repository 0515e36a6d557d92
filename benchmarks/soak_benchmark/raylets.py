"""A Ray head in one place of a network, and a raylet that holds the ranks in the other."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from soak_benchmark.network import Network, Place, environment
from tpinference_engine.executor.ray_environment import prepare_ray_environment

_PORT = 6379
_OBJECT_STORE_BYTES = 128 * 2**20
_STARTED = "Ray runtime started."
_START_S = 120.0
_END_S = 60.0
_POLL_S = 0.1


class Raylets:
    """`with Raylets(network, num_cpus) as raylets:`"""

    def __init__(self, network: Network, num_cpus: int) -> None:
        self._network = network
        self._num_cpus = num_cpus
        self._commands: list[subprocess.Popen[bytes]] = []
        self.address = f"{network.head.address}:{_PORT}"

    def __enter__(self) -> Raylets:
        try:
            head, ranks = self._network.head, self._network.ranks
            # No CPUs, so no rank: the engine core is alone there.
            self._start(head, ["--head", f"--port={_PORT}", "--include-dashboard=false"], 0)
            self._start(ranks, [f"--address={self.address}"], self._num_cpus)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    @property
    def pids(self) -> dict[str, int]:
        """Of those that have to last as long as the engine does."""
        head, ranks = self._network.head, self._network.ranks
        return {
            "gcs": _pid_of("gcs_server", head),
            "head's raylet": _pid_of("raylet", head),
            "ranks' raylet": _pid_of("raylet", ranks),
        }

    def environment(self) -> dict[str, str]:
        """For a driver, too."""
        environ = {**environment(), "RAY_TMPDIR": str(self._network.head.folder)}
        # Nobody else reaches this network, and two places have no file for a token in common.
        environ["RAY_AUTH_MODE"] = "disabled"
        prepare_ray_environment(environ)
        return environ

    def _start(self, place: Place, arguments: list[str], num_cpus: int) -> None:
        log = place.folder / "ray-start.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
        command += [f"--node-ip-address={place.address}", "--num-gpus=0", f"--num-cpus={num_cpus}"]
        # A folder each: the product knows its raylet by the path of its socket.
        command.append(f"--temp-dir={place.folder}")
        command.append(f"--object-store-memory={_OBJECT_STORE_BYTES}")
        with log.open("wb") as output:
            started = subprocess.Popen(
                place.command(command),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._commands.append(started)
        _wait_until_started(started, log)

    def _close(self) -> None:
        for command in reversed(self._commands):
            command.terminate()
        for command in self._commands:
            try:
                command.wait(_END_S)
            except subprocess.TimeoutExpired:
                command.kill()
                command.wait()
        self._commands.clear()


def _wait_until_started(command: subprocess.Popen[bytes], log: Path) -> None:
    pause, end = threading.Event(), time.monotonic() + _START_S
    while _STARTED not in log.read_text():
        if command.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"Ray could not be started: {log.read_text()}")
        pause.wait(_POLL_S)


def _pid_of(program: str, place: Place) -> int:
    found = [pid for pid in place.pids if _program_of(pid) == program]
    if len(found) != 1:
        raise RuntimeError(f"{place.address} has {program} as {found}, expected one process")
    return found[0]


def _program_of(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""  # It ended meanwhile.
    return Path(command).name
