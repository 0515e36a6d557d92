"""Whose fault it was: under every backend the rank that failed is named, and no survivor."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tpinference_engine.errors import GroupFailed, InvalidConfig, RankDied, StepTimedOut

if TYPE_CHECKING:
    from tests.engine.executor.conftest import Group, Processes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

MakeGroup = Callable[..., "Group"]
Backend = dict[str, Any]


def test_rank_that_fails_while_its_peer_waits_is_named_at_once(
    backend: Backend, make_group: MakeGroup, faults: Any, processes: Processes
) -> None:
    group = make_group(faults.FailingRankRunner, **backend)
    group.start()
    with pytest.raises(GroupFailed, match="rank 1 failed: ZeroDivisionError: a bug") as caught:
        group.step()
    assert caught.value.rank == 1
    processes.wait_until_ended(set(group.pids), 5)


def test_peer_that_tells_of_a_death_is_not_taken_for_the_dead(
    backend: Backend, make_group: MakeGroup, faults: Any
) -> None:
    group = make_group(faults.LostPeerRunner, **backend)
    group.start()
    with pytest.raises(RankDied, match=f"rank 1 .*pid {group.pids[1]}") as caught:
        group.step()
    assert caught.value.rank == 1


def freeze(pid: int, processes: Processes) -> None:
    """Each thread stops when it next leaves the kernel, so this waits for all."""

    def states() -> set[str]:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        return {stat.rpartition(")")[2].split()[0] for stat in stats}

    os.kill(pid, signal.SIGSTOP)
    processes.wait_until(lambda: states() == {"T"}, 5, states)


def test_frozen_rank_is_named_when_the_step_is_too_late(
    backend: Backend, make_group: MakeGroup, processes: Processes
) -> None:
    group = make_group(**backend, step_timeout_s=3.0)
    group.start()
    group.echo(1)
    freeze(group.pids[1], processes)
    began = time.monotonic()
    group.submit()
    with pytest.raises(StepTimedOut, match=r"no answer .*ranks \[1\]") as caught:
        group.executor.collect()
    assert caught.value.rank == 1
    assert time.monotonic() - began < 6
    # Ray asks an actor to end before it kills the process, which takes its time with a frozen one.
    with suppress(ProcessLookupError):
        os.kill(group.pids[1], signal.SIGCONT)
    processes.wait_until_ended(set(group.pids), 5)


def test_graph_that_hangs_in_every_rank_blames_none(
    cluster: Any, make_group: MakeGroup, faults: Any
) -> None:
    group = make_group(faults.HangingRunner, ray_address=cluster.address, step_timeout_s=1.0)
    group.start()
    group.submit()
    with pytest.raises(StepTimedOut, match="every rank answers calls") as caught:
        group.executor.collect()
    assert caught.value.rank is None


def test_misspelt_method_is_refused_and_the_group_lives(
    backend: Backend, make_group: MakeGroup
) -> None:
    group = make_group(**backend)
    group.start()
    for name in ("warmup", "_check_turn", "_rank", "__class__"):
        with pytest.raises(InvalidConfig, match=f"'{name}'"):
            group.executor.collective_rpc(name)
    assert group.echo(2) == group.predict(2)


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        pytest.param("initialize", (7, 3), "initialize .*rank is 7", id="an error of the engine's"),
        pytest.param("allocate_cache", ("four",), "TypeError", id="any other"),
    ],
)
def test_failed_call_is_a_failed_group(
    backend: Backend,
    make_group: MakeGroup,
    processes: Processes,
    method: str,
    args: tuple[Any, ...],
    message: str,
) -> None:
    group = make_group(**backend)
    group.start()
    with pytest.raises(GroupFailed, match=message):
        group.executor.collective_rpc(method, args)
    with pytest.raises(GroupFailed, match=message):
        group.executor.check_alive()
    processes.wait_until_ended(set(group.pids), 5)


def test_rank_that_dies_while_the_graph_is_compiled_is_named(
    cluster: Any, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpinference_engine.transport.compiled_graph import CompiledGraphTransport

    group = make_group(ray_address=cluster.address)

    def kill_and_compile(*args: Any, **named: Any) -> Any:
        os.kill(group.pids[1], signal.SIGKILL)
        return CompiledGraphTransport(*args, **named)

    used = "tpinference_engine.executor.step_path.CompiledGraphTransport"
    monkeypatch.setattr(used, kill_and_compile)
    with pytest.raises(RankDied, match="rank 1 ") as caught:
        group.start()
    assert caught.value.rank == 1


def test_group_whose_ranks_cannot_be_watched_has_failed(
    cluster: Any, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, processes: Processes
) -> None:
    from tpinference_engine.executor.lifeline import LifelineListener

    group = make_group(ray_address=cluster.address)
    group.start()
    broken = threading.Event()

    def poll(listener: LifelineListener, timeout_s: float) -> list[int]:
        broken.set()
        raise OSError("too many open files")

    monkeypatch.setattr(LifelineListener, "poll", poll)
    assert broken.wait(5)
    processes.wait_until_ended(set(group.pids), 5)
    with pytest.raises(GroupFailed, match="can't be watched any more: OSError: too many open"):
        group.executor.check_alive()


def test_rank_that_closed_its_pipe_and_runs_on_is_killed(
    make_group: MakeGroup, faults: Any, processes: Processes
) -> None:
    group = make_group(faults.PipeClosingRunner, distributed_executor_backend="mp")
    began = time.monotonic()
    with pytest.raises(GroupFailed, match="rank 1 closed its pipe") as caught:
        group.start()
    assert caught.value.rank == 1
    assert time.monotonic() - began < 30
    processes.wait_until_ended(set(group.pids), 5)
