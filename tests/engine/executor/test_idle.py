"""An idle group under ray stops spinning, takes steps all the same, and comes back to its graph."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tpinference_engine.errors import RankDied, StepTimedOut
from tpinference_engine.executor import step_path

if TYPE_CHECKING:
    from tests.engine.executor.conftest import Group, Processes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

MakeGroup = Callable[..., "Group"]
Backend = dict[str, Any]
LASTING_STEPS = 40
SECONDS_PER_TICK = 1 / os.sysconf("SC_CLK_TCK")


@pytest.fixture(params=["one_raylet", "cluster"])
def placement(request: pytest.FixtureRequest) -> Backend:
    return {"ray_address": request.getfixturevalue(request.param).address}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_path, "UNPARK_AFTER_STEPS", 10)
    monkeypatch.setattr(step_path, "RECOMPILE_AFTER_STEPS", 10)


class Spin:
    """Processor time of the driver and its ranks, in cores."""

    def __init__(self, group: Group) -> None:
        self._pids = [os.getpid(), *group.pids]

    def cores(self, seconds: float = 1.0) -> float:
        began, before = time.monotonic(), self._used_s()
        threading.Event().wait(seconds)
        return (self._used_s() - before) / (time.monotonic() - began)

    def _used_s(self) -> float:
        ticks = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks * SECONDS_PER_TICK


def test_a_resting_group_does_not_spin_and_lasting_work_brings_the_graph_back(
    placement: Backend, make_group: MakeGroup, processes: Processes
) -> None:
    shared_before = processes.shared_memory()
    group = make_group(**placement)
    group.start()
    spin = Spin(group)

    def transport() -> str | None:
        return group.executor.step_transport

    assert group.echo(4) == group.predict(4)
    for _ in range(2):
        group.executor.rest()
        group.executor.rest()
        assert spin.cores() < 0.15
        assert group.echo(2) == group.predict(2)
        assert transport() == "actor-call", "a few steps woke the graph"
        assert group.echo(LASTING_STEPS) == group.predict(LASTING_STEPS)
        assert transport() == "compiled-graph"
        assert processes.shared_memory() <= shared_before, "a graph's names outlive their use"


def test_a_rank_that_dies_in_a_rest_is_named(
    placement: Backend, make_group: MakeGroup, processes: Processes
) -> None:
    group = make_group(**placement)
    group.start()
    group.echo(1)
    group.executor.rest()
    os.kill(group.pids[1], signal.SIGKILL)
    failures: list[str] = []

    def has_failed() -> bool:
        try:
            group.executor.check_alive()
        except RankDied as error:
            failures.append(str(error))
        return bool(failures)

    processes.wait_until(has_failed, 2.0, lambda: failures)
    assert "rank 1" in failures[0]
    group.executor.shutdown()
    processes.wait_until_ended(set(group.pids), 5)


def test_a_group_that_rests_is_shut_down(
    placement: Backend, make_group: MakeGroup, processes: Processes
) -> None:
    shared_before = processes.shared_memory()
    group = make_group(**placement)
    group.start()
    group.echo(1)
    group.executor.rest()
    group.executor.shutdown()
    processes.wait_until_ended(set(group.pids), 5)
    assert processes.shared_memory() <= shared_before


def test_a_rank_that_hangs_when_the_group_comes_to_rest_ends_it_in_time(
    placement: Backend, make_group: MakeGroup, processes: Processes
) -> None:
    group = make_group(**placement, step_timeout_s=10.0)
    group.start()
    group.echo(1)
    os.kill(group.pids[1], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(StepTimedOut):
        group.executor.rest()
        group.submit()
        group.executor.collect()
    assert time.monotonic() - began < 30
    group.executor.shutdown()
    processes.wait_until_ended(set(group.pids), 5)


def test_a_group_that_has_had_its_graphs_stays_with_calls(
    cluster: Any, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_path, "MAX_GRAPHS", 2)
    group = make_group(ray_address=cluster.address)
    group.start()
    for transport in ("compiled-graph", "actor-call"):
        group.executor.rest()
        assert group.echo(LASTING_STEPS) == group.predict(LASTING_STEPS)
        assert group.executor.step_transport == transport
