"""What the executor reads from and removes on the machine it runs on."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tpinference_engine.executor.network_interface import choose_interface, interface_of
from tpinference_engine.executor.ray_environment import prepare_ray_environment
from tpinference_engine.executor.semaphores import (
    find_raylet_pid,
    graph_semaphores,
    sweep_dead_semaphores,
    unlink_semaphores,
)

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def shared_memory(tmp_path: Path) -> Path:
    for name in ("sem.hdr10-1", "sem.obj10-1", "sem.hdr10-2", "sem.obj20-7", "psm_10", "sem.mp-x"):
        (tmp_path / name).touch()
    return tmp_path


def test_semaphores_are_those_of_one_raylet(shared_memory: Path) -> None:
    assert graph_semaphores(10, shared_memory) == {"sem.hdr10-1", "sem.obj10-1", "sem.hdr10-2"}


def test_unlinking_takes_what_is_named_and_bears_what_is_gone(shared_memory: Path) -> None:
    unlink_semaphores(frozenset({"sem.hdr10-1", "sem.hdr10-99"}), shared_memory)
    assert graph_semaphores(10, shared_memory) == {"sem.obj10-1", "sem.hdr10-2"}


def test_sweep_takes_only_those_of_dead_raylets(shared_memory: Path, tmp_path: Path) -> None:
    processes = tmp_path / "proc"
    (processes / "10").mkdir(parents=True)
    assert sweep_dead_semaphores(shared_memory, processes) == 1
    assert sorted(path.name for path in shared_memory.iterdir() if path.is_file()) == [
        "psm_10",
        "sem.hdr10-1",
        "sem.hdr10-2",
        "sem.mp-x",
        "sem.obj10-1",
    ]


def test_absent_shared_memory_is_no_error(tmp_path: Path) -> None:
    assert sweep_dead_semaphores(tmp_path / "none") == 0


def test_raylet_is_found_by_its_socket(tmp_path: Path) -> None:
    commands = {
        "5": b"/ray/raylet\0--raylet_socket_name=/tmp/a\0",
        "6": b"/ray/raylet\0--raylet_socket_name=/tmp/b\0",
        "7": b"python\0agent.py\0--raylet_socket_name=/tmp/b\0",
    }
    for pid, command in commands.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_bytes(command)
    assert find_raylet_pid("/tmp/b", tmp_path) == 6
    assert find_raylet_pid("/tmp/c", tmp_path) is None


def test_loopback_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"


def test_address_of_nobody_has_no_interface() -> None:
    assert interface_of("203.0.113.77") is None
    assert interface_of("2001:db8::77") is None


def test_every_address_of_this_machine_has_an_interface() -> None:
    names = {name for _, name in socket.if_nameindex()}
    found = interface_of(socket.gethostbyname("localhost"))
    assert found in names


def test_chosen_interface_is_for_both_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        # Set first, so that the test's end removes what is set after.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    choose_interface("127.0.0.1")
    assert [os.environ[variable] for variable in VARIABLES] == ["lo", "lo"]


def test_the_users_interface_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "ib0")
    choose_interface("127.0.0.1")
    assert [os.environ[variable] for variable in VARIABLES] == ["ib0", "ib0"]


def test_the_pods_environment_wins_over_defaults() -> None:
    environ = {"RAY_worker_niceness": "5"}
    prepare_ray_environment(environ)
    assert environ["RAY_worker_niceness"] == "5"
    assert environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
