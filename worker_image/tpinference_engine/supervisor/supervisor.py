"""Process 1 of both pods: runs Ray, on the head also the engine, and ends the container.

A container ends when it is told to or when its Ray process died, never because the engine failed:
then Ray stays up and the failure is shown, so that whoever decides about the group can read it.
It imports neither Ray nor torch and knows the engine as a command.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpinference_engine.supervisor.admin_port import AdminPort, admin_app
from tpinference_engine.supervisor.child import Child, reap
from tpinference_engine.supervisor.failure import (
    TERMINATION_LOG,
    Failure,
    crash_failure,
    ended_status,
    read_failure,
    write_termination_log,
)

Role = Literal["head", "worker"]

_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_WATCHED = _STOP_SIGNALS | {signal.SIGCHLD}
_POLL_S = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    role: Role
    ray_command: str
    """A line of shell that runs Ray in the foreground."""
    engine_command: tuple[str, ...] = ()
    """On the head."""
    engine_id: str = "engine"
    epoch: int = 0
    pod_name: str | None = None
    node_name: str | None = None
    host: str = "0.0.0.0"
    admin_port: int = 8001
    engine_stop_s: float = 80.0
    """After SIGTERM, until an engine that has not ended is killed: its drain and some more."""
    ray_stop_s: float = 8.0
    orphaned_engine_stop_s: float = 5.0
    """After Ray's death, for the engine to write its answers and end."""
    failure_file: Path
    """Where the engine leaves its failure."""
    termination_log: Path = TERMINATION_LOG


class Supervisor:
    def __init__(
        self,
        config: SupervisorConfig,
        environ: Mapping[str, str],
        count_ranks: Callable[[], int],
    ) -> None:
        """`count_ranks`: rank processes in this pod, which Ray has to outlive."""
        self._config = config
        self._environ = environ
        self._count_ranks = count_ranks
        self._engine: Child | None = None
        self._failure: Failure | None = None
        self._engine_end_noted = False
        self._admin: AdminPort | None = None
        self._admin_error = ""
        self._stop_asked_at: float | None = None
        self._ray_stop_at: float | None = None

    def run(self) -> int:
        """Returns the container's exit code."""
        # Blocked and waited for, so that no handler interrupts anything. Children get a clean mask.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        config = self._config
        self._ray = Child("ray", ("/bin/sh", "-c", f"exec {config.ray_command}"), self._environ)
        if config.engine_command:
            self._engine = self._start_engine()
        while self._ray.running:
            self._wait_for_event()
            self._note_engine_end()
            if self._wants_admin_port():
                self._open_admin_port()
            if self._stop_asked_at is not None:
                self._advance_stop(self._stop_asked_at)
        return self._end()

    def _start_engine(self) -> Child:
        failure_file = self._config.failure_file
        failure_file.unlink(missing_ok=True)
        environ = {**self._environ, "TPINFERENCE_FAILURE_FILE": str(failure_file)}
        return Child("engine", self._config.engine_command, environ)

    def _wait_for_event(self) -> None:
        got = signal.sigtimedwait(_WATCHED, _POLL_S)
        reap(self._children())
        if got is not None and got.si_signo in _STOP_SIGNALS:
            self._on_stop_signal(signal.Signals(got.si_signo))

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._stop_asked_at is None:
            self._stop_asked_at = time.monotonic()
        # The first makes the engine drain, the next one makes it end at once.
        if self._engine is not None:
            self._engine.send(number)

    def _advance_stop(self, asked_at: float) -> None:
        """The engine first: its requests and its ranks need Ray until they have ended."""
        waited = time.monotonic() - asked_at
        if self._engine is not None and self._engine.running:
            if waited > self._config.engine_stop_s:
                self._engine.kill_group()
            return
        if self._count_ranks() and waited <= self._config.engine_stop_s:
            return
        if self._ray_stop_at is None:
            self._ray_stop_at = time.monotonic()
            self._ray.send(signal.SIGTERM)
        elif time.monotonic() - self._ray_stop_at > self._config.ray_stop_s:
            self._ray.kill_group()

    def _note_engine_end(self) -> None:
        engine = self._engine
        if engine is None or engine.running or self._engine_end_noted:
            return
        self._engine_end_noted = True
        if engine.exit_code != 0 and not self._ended_as_asked(engine):
            self._failure = read_failure(self._config.failure_file) or self._crash(engine)
            logger.error("%s: %s", self._failure["reason"], self._failure["message"])
            write_termination_log(self._config.termination_log, _last_words(self._failure))

    def _ended_as_asked(self, engine: Child) -> bool:
        """A signal that comes before the engine's handlers are in ends it, and that was wanted."""
        asked = self._stop_asked_at is not None
        return asked and engine.exit_code in {-number for number in _STOP_SIGNALS}

    def _wants_admin_port(self) -> bool:
        """Where no engine runs that has it, and nobody asked for an end yet."""
        has_engine = self._engine is not None and self._engine.running
        return self._admin is None and self._stop_asked_at is None and not has_engine

    def _crash(self, engine: Child) -> Failure:
        how = engine.describe_end()
        return crash_failure(how, engine.exit_code, self._config.pod_name, self._config.node_name)

    def _open_admin_port(self) -> None:
        config = self._config
        status = None
        if config.engine_command:

            def status() -> dict[str, object]:
                return ended_status(config.engine_id, config.epoch, self._failure)

        app = admin_app(self._why_not_ready, status)
        try:
            self._admin = AdminPort(app, config.host, config.admin_port)
        except (OSError, OverflowError) as error:
            # Tried again in the next turn: a container that ended would take Ray and ranks along.
            if str(error) != self._admin_error:
                logger.error("can't open the admin port %d: %s", config.admin_port, error)
            self._admin_error = str(error)

    def _why_not_ready(self) -> str | None:
        if self._stop_asked_at is not None:
            return "stopping"
        if self._engine is not None:
            return f"the engine {self._engine.describe_end()}"
        return None if self._ray.running else f"ray {self._ray.describe_end()}"

    def _end(self) -> int:
        asked = self._stop_asked_at is not None
        if not asked:
            words = f"the Ray process {self._ray.describe_end()}"
            logger.error("%s, so this container ends", words)
            if self._failure is None:
                write_termination_log(self._config.termination_log, words)
        self._end_engine()
        if self._admin is not None:
            self._admin.close()
        self._config.failure_file.unlink(missing_ok=True)
        if asked:
            return 0 if self._failure is None else 1
        return _shell_code(self._ray.exit_code)

    def _end_engine(self) -> None:
        """Only for one that Ray's death left behind."""
        engine = self._engine
        if engine is None:
            return
        engine.send(signal.SIGTERM)
        end = time.monotonic() + self._config.orphaned_engine_stop_s
        while engine.running:
            if time.monotonic() > end:
                engine.kill_group()
            signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)
            reap(self._children())

    def _children(self) -> list[Child]:
        return [self._ray] if self._engine is None else [self._ray, self._engine]


def count_rank_processes(processes: Path = Path("/proc")) -> int:
    """Actors of ours that a raylet in this pod runs.

    Ray titles them "ray::<name>:RankActor.__init__" while they are made, then "ray::RankActor",
    with ".<method>" behind it in a call.
    """
    count = 0
    for command in processes.glob("[0-9]*/cmdline"):
        try:
            title = command.read_bytes()
        except OSError:
            continue  # It ended meanwhile.
        count += title.startswith(b"ray::") and b":RankActor" in title
    return count


def _last_words(failure: Failure) -> str:
    return f"{failure['reason']}: {failure['message']}"


def _shell_code(exit_code: int | None) -> int:
    assert exit_code is not None, "it has ended"
    return exit_code if exit_code >= 0 else 128 - exit_code
