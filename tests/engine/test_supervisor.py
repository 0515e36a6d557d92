"""Process 1 of a pod, with scripts in place of Ray and the engine: who ends when, who is told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tpinference_engine.errors import InvalidConfig
from tpinference_engine.supervisor.command_line import parse_supervise
from tpinference_engine.supervisor.failure import write_termination_log
from tpinference_engine.supervisor.supervisor import count_rank_processes

DEADLINE_S = 20.0
POLL_S = 0.02
PAUSE = threading.Event()

# The number of ranks is a file's existence here.
RUN_SUPERVISOR = """
import ctypes, json, logging, os, sys
from pathlib import Path
from tpinference_engine.supervisor.supervisor import Supervisor, SupervisorConfig
PR_SET_CHILD_SUBREAPER = 36  # Orphans come to it, as to process 1.
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
logging.basicConfig(level=logging.INFO)
config = json.loads(sys.argv[1])
ranks = Path(config.pop("ranks"))
for name in ("failure_file", "termination_log"):
    config[name] = Path(config[name])
config["engine_command"] = tuple(config["engine_command"])
sys.exit(Supervisor(SupervisorConfig(**config), os.environ, lambda: int(ranks.exists())).run())
"""
LOOP = "echo up >>{log}; while :; do sleep 0.05; done"
RUN_FOREVER = "trap 'echo {name} TERM >>{log}; exit 0' TERM; " + LOOP
STUBBORN = "trap '' TERM; " + LOOP


class Pod:
    """A supervisor under test, its log of events and its admin port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "events"
        self.ranks = folder / "ranks"
        self.termination_log = folder / "termination-log"
        self.failure_file = folder / "failure.json"
        self.port = free_port()
        self._output = folder / "output"
        self.process: subprocess.Popen[bytes] | None = None

    def script(self, name: str, body: str) -> str:
        path = self.folder / f"{name}.sh"
        path.write_text(body.format(log=self.log, name=name))
        return f"/bin/sh {path}"

    def start(self, ray: str, engine: str | None = None, **changes: object) -> None:
        config: dict[str, object] = {
            "role": "head" if engine else "worker",
            "ray_command": ray,
            "engine_command": engine.split() if engine else [],
            "engine_id": "chat-0-abc",
            "epoch": 7,
            "pod_name": "pod-a",
            "host": "127.0.0.1",
            "admin_port": self.port,
            "ranks": str(self.ranks),
            "failure_file": str(self.failure_file),
            "termination_log": str(self.termination_log),
        }
        command = [sys.executable, "-c", RUN_SUPERVISOR, json.dumps({**config, **changes})]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(command, stderr=output)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def logged(self, text: str) -> bool:
        return text in self.output

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def children(self) -> list[int]:
        """Each leads a process group of its own."""
        assert self.process is not None
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(child) for t in threads for child in (t / "children").read_text().split()]

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def events(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def get(self, path: str) -> tuple[int, str] | None:
        """None while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except urllib.error.URLError:
            return None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(what: Callable[[], Any], seen: Callable[[], Any]) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert time.monotonic() < end, f"not within {DEADLINE_S} s, seen: {seen()}"
        PAUSE.wait(POLL_S)
    return found


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(tmp_path)
    yield pod
    if pod.running:
        # Out of a pod nobody ends what a killed process 1 leaves.
        groups = pod.children()
        pod.signal(signal.SIGKILL)
        pod.wait()
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def test_failed_engine_keeps_the_container_and_shows_its_failure(pod: Pod) -> None:
    failure = {"reason": "InvalidModel", "message": "no config.json", "rank": None}
    (pod.folder / "given").write_text(json.dumps(failure))
    leave_it = f'cp {pod.folder}/given "$TPINFERENCE_FAILURE_FILE"; exit 1'
    pod.start(pod.script("ray", RUN_FOREVER), pod.script("engine", leave_it))

    status = wait_for(lambda: pod.get("/engine/status"), lambda: pod.events)

    shown = json.loads(status[1])
    assert shown["state"] == "failed"
    assert (shown["engineId"], shown["epoch"]) == ("chat-0-abc", 7)
    assert (shown["reason"], shown["message"]) == ("InvalidModel", "no config.json")
    assert shown["lastFailure"] == failure
    assert pod.get("/livez") == (200, "ok")
    assert pod.get("/readyz") == (503, "the engine ended with code 1")
    assert pod.termination_log.read_text() == "InvalidModel: no config.json"
    assert pod.running
    pod.signal(signal.SIGTERM)
    assert pod.wait() == 1
    assert "ray TERM" in pod.events


def test_engine_that_dies_without_a_word_is_a_crash(pod: Pod) -> None:
    pod.start(pod.script("ray", RUN_FOREVER), pod.script("engine", "kill -9 $$"))

    status = wait_for(lambda: pod.get("/engine/status"), lambda: pod.events)

    failure = json.loads(status[1])["lastFailure"]
    assert failure["reason"] == "EngineCrashed"
    assert failure["message"] == "the engine process was killed by SIGKILL"
    assert (failure["exitCode"], failure["pod"]) == (-9, "pod-a")


def test_container_ends_with_ray_and_its_code(pod: Pod) -> None:
    pod.start(
        pod.script("ray", "while [ ! -e {log} ]; do sleep 0.05; done; exit 17"),
        pod.script("engine", RUN_FOREVER),
    )

    assert pod.wait() == 17

    assert pod.events == ["up", "engine TERM"]
    assert pod.termination_log.read_text() == "the Ray process ended with code 17"


def test_ray_killed_by_a_signal_ends_the_container_as_a_shell_says_it(pod: Pod) -> None:
    pod.start(pod.script("ray", "kill -9 $$"))
    assert pod.wait() == 128 + 9


def test_engine_that_ignores_rays_death_is_killed_with_its_group(pod: Pod) -> None:
    stubborn = "trap '' TERM; echo up >>{log}; sleep 1000 & echo $! >>{log}; wait; wait"
    pod.start(
        pod.script("ray", "while [ ! -e {log} ]; do sleep 0.05; done; exit 3"),
        pod.script("engine", stubborn),
        orphaned_engine_stop_s=0.3,
    )
    assert pod.wait() == 3
    grandchild = int(pod.events[1])
    wait_for(lambda: not Path(f"/proc/{grandchild}/root").exists(), lambda: grandchild)


def test_sigterm_ends_the_engine_before_ray(pod: Pod) -> None:
    drains = "trap 'sleep 0.3; echo engine TERM >>{log}; exit 0' TERM; " + LOOP
    pod.start(pod.script("ray", RUN_FOREVER), pod.script("engine", drains))
    wait_for(lambda: pod.events.count("up") == 2, lambda: pod.events)

    pod.signal(signal.SIGTERM)

    assert pod.wait() == 0
    assert pod.events[-2:] == ["engine TERM", "ray TERM"]


def test_second_sigterm_reaches_the_engine_too(pod: Pod) -> None:
    slow = "n=0; trap 'n=$((n+1)); echo engine $n >>{log}; [ $n = 2 ] && exit 0' TERM;" + LOOP
    pod.start(pod.script("ray", RUN_FOREVER), pod.script("engine", slow))
    wait_for(lambda: pod.events.count("up") == 2, lambda: pod.events)

    pod.signal(signal.SIGTERM)
    wait_for(lambda: "engine 1" in pod.events, lambda: pod.events)
    pod.signal(signal.SIGTERM)

    assert pod.wait() == 0
    assert pod.events[-3:] == ["engine 1", "engine 2", "ray TERM"]


def test_engine_that_does_not_drain_in_time_is_killed_and_ray_still_ends_in_order(pod: Pod) -> None:
    pod.start(pod.script("ray", RUN_FOREVER), pod.script("engine", STUBBORN), engine_stop_s=0.3)
    wait_for(lambda: pod.events.count("up") == 2, lambda: pod.events)

    pod.signal(signal.SIGTERM)

    assert pod.wait() == 1
    assert pod.events[-1] == "ray TERM"


def test_ray_that_ignores_sigterm_is_killed(pod: Pod) -> None:
    pod.start(pod.script("ray", STUBBORN), ray_stop_s=0.3)
    wait_for(lambda: pod.events == ["up"], lambda: pod.events)
    pod.signal(signal.SIGTERM)
    assert pod.wait() == 0


def test_worker_is_ready_while_ray_runs_and_keeps_it_until_its_ranks_ended(pod: Pod) -> None:
    pod.ranks.touch()
    pod.start(pod.script("ray", RUN_FOREVER))
    wait_for(lambda: pod.get("/readyz") == (200, "ok"), lambda: pod.get("/readyz"))
    assert pod.get("/livez") == (200, "ok")
    wait_for(lambda: pod.events == ["up"], lambda: pod.events)

    pod.signal(signal.SIGTERM)
    wait_for(lambda: pod.get("/readyz") == (503, "stopping"), lambda: pod.get("/readyz"))
    assert pod.events == ["up"], "Ray was stopped while a rank still ran"
    pod.ranks.unlink()

    assert pod.wait() == 0
    assert pod.events == ["up", "ray TERM"]


def test_admin_port_is_the_engines_while_it_runs(pod: Pod) -> None:
    pod.start(pod.script("ray", RUN_FOREVER), pod.script("engine", RUN_FOREVER))
    wait_for(lambda: pod.events.count("up") == 2, lambda: pod.events)
    with socket.create_server(("127.0.0.1", pod.port)):
        assert pod.running


@pytest.mark.parametrize("engine", [None, "kill -9 $$"], ids=["worker", "head"])
def test_admin_port_that_is_taken_is_tried_again_and_the_container_lives(
    pod: Pod, engine: str | None
) -> None:
    script = engine and pod.script("engine", engine)
    with socket.create_server(("127.0.0.1", pod.port)):
        pod.start(pod.script("ray", RUN_FOREVER), script)
        wait_for(lambda: pod.logged("can't open the admin port"), lambda: pod.output)
        assert pod.running
    wait_for(lambda: pod.get("/livez") == (200, "ok"), lambda: pod.output)
    assert pod.output.count("can't open the admin port") == 1
    pod.signal(signal.SIGTERM)
    assert pod.wait() == (1 if engine else 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_engine_that_ends_by_the_asked_signal_before_it_handles_any_is_no_crash(
    pod: Pod, number: signal.Signals
) -> None:
    pod.start(pod.script("ray", "trap 'exit 0' TERM; " + LOOP), pod.script("engine", LOOP))
    wait_for(lambda: pod.events.count("up") == 2, lambda: pod.events)
    pod.signal(number)
    assert pod.wait() == 0
    assert not pod.termination_log.exists()


def test_engine_that_another_signals_is_a_crash(pod: Pod) -> None:
    pod.start(pod.script("ray", RUN_FOREVER), pod.script("engine", "kill -TERM $$"))
    status = wait_for(lambda: pod.get("/engine/status"), lambda: pod.events)
    failure = json.loads(status[1])["lastFailure"]
    assert (failure["reason"], failure["exitCode"]) == ("EngineCrashed", -15)


def test_orphans_are_reaped(pod: Pod) -> None:
    orphaning = "(sleep 0.2 & echo $! >>{log}) ; trap 'exit 0' TERM; while :; do sleep 0.05; done"
    pod.start(f"env {pod.script('ray', orphaning)}")
    wait_for(lambda: pod.events, lambda: pod.events)
    orphan = int(pod.events[0])
    wait_for(lambda: not Path(f"/proc/{orphan}").exists(), lambda: orphan)
    pod.signal(signal.SIGTERM)
    assert pod.wait() == 0


def test_real_command_reports_a_wrong_flag_of_the_engine(pod: Pod) -> None:
    environ = {
        **os.environ,
        "KUBERAY_GEN_RAY_START_CMD": pod.script("ray", RUN_FOREVER),
        "TPINFERENCE_ENGINE_ID": "chat-0-abc",
        "TMPDIR": str(pod.folder),
    }
    command = (sys.executable, "-m", "tpinference_engine", "supervise", "--role", "head")
    flags = ("serve", "/models/m", "--dtype", "int3")
    pod.process = subprocess.Popen(
        [*command, "--admin-port", str(pod.port), "--", *flags], env=environ
    )

    status = wait_for(lambda: pod.get("/engine/status"), lambda: pod.events)

    failure = json.loads(status[1])["lastFailure"]
    assert failure["reason"] == "InvalidConfig"
    assert "--dtype" in failure["message"] and "bfloat16" in failure["message"]
    pod.signal(signal.SIGTERM)
    assert pod.wait() == 1


RAY_ENVIRON = {"KUBERAY_GEN_RAY_START_CMD": "ray start --head --block"}


def test_head_runs_the_given_engine_and_waits_for_its_drain() -> None:
    argv = ["--role", "head", "--", "serve", "/m", "--shutdown-timeout", "33", "--admin-port", "81"]
    environ = {**RAY_ENVIRON, "TPINFERENCE_ENGINE_ID": "e", "TPINFERENCE_EPOCH": "4"}

    config = parse_supervise(argv, environ)

    assert config.engine_command[1:] == ("-P", "-m", "tpinference_engine", *argv[3:])
    assert (config.engine_id, config.epoch) == ("e", 4)
    assert config.engine_stop_s > 33
    assert config.admin_port == 81


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        pytest.param(["--role", "worker"], {}, "KUBERAY_GEN_RAY_START_CMD is not set", id="no ray"),
        pytest.param(["--role", "head"], RAY_ENVIRON, "must begin with 'serve'", id="no engine"),
        pytest.param(
            ["--role", "worker", "--", "serve", "/m"],
            RAY_ENVIRON,
            "allows none",
            id="worker engine",
        ),
        pytest.param(["--role", "tail"], RAY_ENVIRON, "'head', 'worker'", id="unknown role"),
    ],
)
def test_wrong_supervision_is_refused(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        parse_supervise(argv, environ)


def test_termination_log_is_cut_to_what_the_kubelet_reads(tmp_path: Path) -> None:
    write_termination_log(tmp_path / "log", "x" * 5000)
    assert (tmp_path / "log").read_text() == "x" * 4096


def test_ranks_are_counted_by_their_titles(tmp_path: Path) -> None:
    ranks = [
        b"ray::tpinference-e-epoch3-1:RankActor.__init__",
        b"ray::RankActor",
        b"ray::RankActor.step",
    ]
    others = [b"ray::IDLE", b"ray::DashboardAgent", b"vi ray::RankActor.txt"]
    for pid, title in enumerate([*ranks, *others]):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(title)
    assert count_rank_processes(tmp_path) == len(ranks)
