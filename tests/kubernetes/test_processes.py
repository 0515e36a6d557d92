"""What is started is stopped, and nothing else ever is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from embedded.errors import NotReached, ProcessEnded
from embedded.processes import Processes, read_start_ticks
from embedded.wait import wait_for

SLEEP = ["sleep", "600"]


@pytest.fixture(autouse=True)
def leave_nobody_dead() -> Iterator[None]:
    """What another run stops stays a dead child of this one, and later tests count theirs."""
    yield
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def test_a_started_process_runs_until_it_is_stopped(tmp_path: Path) -> None:
    processes = Processes(tmp_path, tied=True)
    pid = processes.start("a", SLEEP).pid
    assert processes.is_running("a")
    processes.stop("a")
    assert read_start_ticks(pid) is None
    assert processes.names() == []


def test_another_run_stops_what_is_recorded(tmp_path: Path) -> None:
    started = Processes(tmp_path, tied=False)
    pid = started.start("a", SLEEP).pid
    Processes(tmp_path, tied=False).stop_all()
    assert read_start_ticks(pid) is None


def test_a_reused_process_id_is_never_touched(tmp_path: Path) -> None:
    processes = Processes(tmp_path, tied=True)
    record = processes.start("a", SLEEP)
    file = tmp_path / "pids" / "a.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "start_ticks": 1}))
    processes.stop("a")
    assert read_start_ticks(record.pid) is not None
    file.write_text(json.dumps({"name": "a", "pid": record.pid, "start_ticks": record.start_ticks}))
    processes.stop("a")
    assert read_start_ticks(record.pid) is None


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    processes = Processes(tmp_path, tied=True)
    processes.start("a", ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"])
    wait_for("it to run", lambda: "up" in processes.log_tail("a"), timeout_s=30)
    processes.stop("a", timeout_s=0.2)
    assert not processes.is_running("a")


def test_a_tied_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from embedded.processes import Processes;"
        "print(Processes(pathlib.Path(sys.argv[1]), tied=True).start('a', ['sleep', '600']).pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    pid = int(done.stdout)
    wait_for("it to end", lambda: read_start_ticks(pid) is None, timeout_s=30)


def test_a_process_that_ended_is_reported_with_its_log(tmp_path: Path) -> None:
    processes = Processes(tmp_path, tied=True)
    processes.start("a", ["sh", "-c", "echo no such flag; exit 1"])
    wait_for("it to end", lambda: not processes.is_running("a"), timeout_s=30)
    with pytest.raises(ProcessEnded, match="no such flag"):
        processes.check_running("a")


def test_a_missed_deadline_says_what_was_seen() -> None:
    with pytest.raises(NotReached, match="(?s)the moon: not within 0 s.*only clouds"):
        wait_for("the moon", lambda: None, timeout_s=0, describe=lambda: "only clouds")
