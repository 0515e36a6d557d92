"""The operator as a real process, as in production, only faster: short resync, short Lease."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from embedded.port import free_ports
from embedded.processes import TIED_PREFIX
from embedded.wait import wait_for

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0

FAST = {
    "resync_seconds": "1",
    "lease_namespace": "default",
    # Long, so that a busy machine ends nobody; tests of the Lease itself use SHORT_LEASE.
    "lease_duration_seconds": "30",
    "lease_renew_deadline_seconds": "25",
    "lease_retry_seconds": "1",
    "discovery_seconds": "1",
    "engine_status_seconds": "2",
    "default_engine_image": "example.invalid/engine:1",
}

SHORT_LEASE = {
    "lease_duration_seconds": "6",
    "lease_renew_deadline_seconds": "4.5",
    "lease_retry_seconds": "0.5",
}


def write_kubeconfig(path: Path, *, server: str, token: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass
class OperatorProcess:
    """One replica. `settings` are the operator's own, by field name."""

    name: str
    kubeconfig: Path
    log_file: Path
    settings: dict[str, str]
    python_path: tuple[Path, ...] = ()
    port: int = 0
    _child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> OperatorProcess:
        (self.port,) = free_ports(1)
        settings = {**FAST, **self.settings, "port": str(self.port), "bind_address": "127.0.0.1"}
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("TPINFERENCE_OPERATOR_")},
            **{f"TPINFERENCE_OPERATOR_{k.upper()}": v for k, v in settings.items()},
            "KUBECONFIG": str(self.kubeconfig),
            "PYTHONPATH": os.pathsep.join(map(str, self.python_path)),
        }
        with self.log_file.open("ab") as log:
            self._child = subprocess.Popen(
                [*TIED_PREFIX, sys.executable, "-m", "tpinference_operator"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._child is None else self._child.poll()

    @property
    def pid(self) -> int:
        if self._child is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._child.pid

    def get(self, route: str) -> tuple[int, str]:
        """Status and text of one of its routes; status 0 when nobody answers."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{route}", timeout=5
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (urllib.error.URLError, OSError):
            return 0, ""

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = self.get("/metrics")[1]
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def is_acting(self) -> bool:
        return self.metric("tpinference_operator_lease_held") == 1

    def wait_ready(self) -> OperatorProcess:
        self._wait(f"{self.name} to be ready", lambda: self.get("/readyz")[0] == 200)
        return self

    def wait_acting(self) -> OperatorProcess:
        self.wait_ready()
        self._wait(f"{self.name} to hold the Lease", self.is_acting)
        return self

    def wait_ended(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        wait_for(
            f"{self.name} to end",
            lambda: not self.is_running,
            timeout_s=timeout_s,
            describe=self.log_tail,
        )
        return int(self.exit_code or 0)

    def stop(self) -> int:
        """As kubelet does: SIGTERM, and what it ended with."""
        if self.is_running:
            os.kill(self.pid, signal.SIGTERM)
        return self.wait_ended()

    def kill(self) -> None:
        """As a crash does. Also from another thread, in the middle of a request."""
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait(STOP_TIMEOUT_S)

    def log_tail(self) -> str:
        return self.log_file.read_bytes()[-6000:].decode(errors="replace")

    def _wait(self, what: str, look: object) -> None:
        def check() -> bool:
            if not self.is_running:
                raise AssertionError(f"{what}: it ended with {self.exit_code}\n{self.log_tail()}")
            return bool(look())  # type: ignore[operator]

        wait_for(what, check, timeout_s=READY_TIMEOUT_S, describe=self.log_tail)
