"""Joining the Ray cluster of this engine, or starting a local one, and leaving no trace of it.

Ray is told its address on every path: a stale address file under /tmp would otherwise make it join
a dead cluster. It does not know what runs on the cluster.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from tpinference_engine.errors import InvalidConfig, RanksNotPlaced
from tpinference_engine.executor.deadline import Deadline
from tpinference_engine.executor.semaphores import find_raylet_pid

_LOCAL_OBJECT_STORE_BYTES = 256 * 2**20
_JOIN_RETRY_S = 1.0
_PROBE_TIMEOUT_S = 5.0
_SET_BY_RAY = ("RAY_AUTH_MODE", "PYTHONBREAKPOINT")
"""What Ray leaves in this process's environment. A local Ray's mode breaks joining another's."""
_TEMP_PREFIX = "tpinference-ray-"
_TEMP_NAME = re.compile(_TEMP_PREFIX + r"(\d+)-.*")

logger = logging.getLogger(__name__)


class RayCluster:
    """One connection to one cluster. `join` and `leave` belong to one thread.

    That thread must live as long as the engine: processes of a local Ray end with it.
    """

    def __init__(self, address: str | None, num_ranks: int) -> None:
        self._address = address
        self._num_ranks = num_ranks
        self._folder: Path | None = None
        self._environ_before: dict[str, str | None] = {}

    def join(self, deadline: Deadline) -> None:
        self._environ_before = {name: os.environ.get(name) for name in _SET_BY_RAY}
        with _signal_handlers_kept():
            if self._address is None:
                self._start_local()
            else:
                _connect(self._address, deadline)

    def leave(self) -> None:
        """Idempotent."""
        ray.shutdown()
        self._restore_environment()
        if self._folder is not None:
            shutil.rmtree(self._folder, onerror=_log_kept_file)
            self._folder = None

    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def node_address(self) -> str:
        """What other nodes reach this one at."""
        return str(ray.util.get_node_ip_address())

    def node_table(self) -> list[Mapping[str, Any]]:
        return list(ray.nodes())

    def raylet_pid(self) -> int | None:
        """Of this node's raylet."""
        node_id = self.node_id()
        sockets = [n["RayletSocketName"] for n in self.node_table() if n["NodeID"] == node_id]
        return find_raylet_pid(sockets[0]) if sockets else None

    def _restore_environment(self) -> None:
        for name, value in self._environ_before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._environ_before = {}

    def _start_local(self) -> None:
        sweep_local_folders(Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_TEMP_PREFIX}{os.getpid()}-"))
        try:
            _init(
                address="local",
                num_cpus=self._num_ranks,
                include_dashboard=False,
                object_store_memory=_LOCAL_OBJECT_STORE_BYTES,
                _temp_dir=str(self._folder),
            )
        except RanksNotPlaced as error:
            raise RanksNotPlaced(
                f"a local Ray could not be started: {error}; if it took too long, start the engine "
                "again when the machine is less busy; a running cluster can be given as "
                "ray_address, and distributed_executor_backend 'mp' needs no Ray"
            ) from error


def sweep_local_folders(parent: Path) -> None:
    """Removes the folders of local Rays whose engine was killed."""
    for folder in parent.glob(f"{_TEMP_PREFIX}*"):
        match = _TEMP_NAME.fullmatch(folder.name)
        if match and not Path("/proc", match[1]).exists():
            shutil.rmtree(folder, onerror=_log_kept_file)


def _init(**arguments: Any) -> None:
    """`ray.init`, whose failures have no class in common: a start too slow is a bare Exception."""
    try:
        ray.init(**arguments)
    except Exception as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise RanksNotPlaced(f"{type(error).__name__}: {said}") from error


def _connect(address: str, deadline: Deadline) -> None:
    """A head answers before its own raylet is registered, so this retries."""
    pause = threading.Event()
    while True:
        try:
            # Ray's own attempt takes minutes to give up on a port where nobody listens.
            _probe(address)
            _init(address=address)
            return
        except (OSError, RanksNotPlaced) as error:
            ray.shutdown()
            if deadline.remaining_s < _JOIN_RETRY_S:
                raise RanksNotPlaced(f"no Ray cluster at {address!r}: {error}") from error
            logger.info("Ray at %s is not ready yet: %s", address, error)
        pause.wait(_JOIN_RETRY_S)


def _probe(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidConfig(f"ray_address is {address!r}, must be host:port")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S):
        pass


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """`ray.init` replaces the handler of SIGTERM, which is the engine's to drain by."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _log_kept_file(_function: object, path: str, error: object) -> None:
    logger.warning("could not remove %s: %s", path, error)
