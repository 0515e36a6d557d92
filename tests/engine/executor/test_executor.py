"""Ranks under every backend: they take steps, and they end in every way they can end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tpinference_engine.errors import (
    GroupFailed,
    InvalidModel,
    MessageCorrupt,
    RankDied,
    StartupTimedOut,
    StepTimedOut,
)
from tpinference_engine.supervisor.supervisor import count_rank_processes

if TYPE_CHECKING:
    from tests.engine.executor.conftest import Group, Processes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

MakeGroup = Callable[..., "Group"]
Backend = dict[str, Any]


def test_ranks_take_steps_and_leave_nothing(
    backend: Backend, make_group: MakeGroup, processes: Processes
) -> None:
    shared_before = processes.shared_memory()
    group = make_group(**backend)
    group.start()

    assert group.echo(8) == group.predict(8)
    assert group.executor.num_blocks > 0
    assert [place.rank for place in group.executor.places] == [0, 1]
    assert [p["pid"] for p in group.executor.collective_rpc("place")] == group.pids
    assert len(set(group.pids)) == 2
    group.executor.check_alive()
    if "step_transport" in backend:
        assert count_rank_processes() >= 2, "a supervisor would not see its ranks"
        assert group.stages == ["rayJoined", "weightsLoaded", "graphCompiled", "warmedUp"]
        assert processes.shared_memory() <= shared_before, "names outlive their use"

    pids = set(group.pids)
    group.executor.shutdown()
    group.executor.shutdown()

    processes.wait_until_ended(pids, 5)
    assert processes.shared_memory() <= shared_before


def test_killed_idle_rank_is_named_within_a_second(
    backend: Backend, make_group: MakeGroup, processes: Processes
) -> None:
    group = make_group(**backend)
    group.start()
    group.echo(1)
    failures: list[RankDied] = []

    def has_failed() -> bool:
        try:
            group.executor.check_alive()
        except RankDied as error:
            failures.append(error)
        return bool(failures)

    os.kill(group.pids[1], signal.SIGKILL)

    processes.wait_until(has_failed, 1.0, lambda: failures)
    assert failures[0].rank == 1
    assert str(group.pids[1]) in str(failures[0])
    with pytest.raises(RankDied, match="rank 1"):
        group.submit()
    processes.wait_until_ended(set(group.pids), 5)


def test_killed_rank_ends_a_step_that_its_peer_hangs_in(
    backend: Backend, make_group: MakeGroup, faults: Any, processes: Processes
) -> None:
    group = make_group(faults.HangingRunner, **backend)
    group.start()
    group.submit()
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(group.pids[1], signal.SIGKILL)

    threading.Timer(0.5, kill).start()

    with pytest.raises(RankDied) as caught:
        group.executor.collect()

    assert time.monotonic() - killed_at[0] < 1.0
    assert caught.value.rank == 1
    began = time.monotonic()
    group.executor.shutdown()
    assert time.monotonic() - began < 10
    processes.wait_until_ended(set(group.pids), 1)


def test_hang_ends_at_the_step_timeout(
    backend: Backend, make_group: MakeGroup, faults: Any, processes: Processes
) -> None:
    group = make_group(faults.HangingRunner, **backend, step_timeout_s=1.0)
    group.start()
    group.submit()
    with pytest.raises(StepTimedOut):
        group.executor.collect()
    processes.wait_until_ended(set(group.pids), 5)


def test_error_of_a_rank_comes_back_as_itself_and_ends_the_group(
    backend: Backend, make_group: MakeGroup, processes: Processes
) -> None:
    group = make_group(**backend)
    group.start()
    group.step()
    group.step_id += 1
    with pytest.raises(MessageCorrupt, match="must be its successor"):
        group.step()
    processes.wait_until_ended(set(group.pids), 5)


def test_bug_in_a_rank_is_a_failed_group(
    backend: Backend, make_group: MakeGroup, faults: Any
) -> None:
    group = make_group(faults.BuggyRunner, **backend)
    group.start()
    with pytest.raises(GroupFailed, match="ZeroDivisionError.*a bug"):
        group.step()


def test_model_that_one_rank_cannot_load_ends_the_start(
    backend: Backend, make_group: MakeGroup, faults: Any
) -> None:
    group = make_group(faults.CutOffModelRunner, **backend)
    with pytest.raises(InvalidModel, match="cut off"):
        group.start()


def test_start_that_takes_too_long_says_in_what(
    backend: Backend, make_group: MakeGroup, faults: Any
) -> None:
    group = make_group(faults.EndlessLoadRunner, **backend, startup_timeout_s=15.0)
    with pytest.raises(StartupTimedOut, match=r"startup_timeout_s 15.*load_model.*ranks \[0, 1\]"):
        group.start()
