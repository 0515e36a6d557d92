"""Ranks over several Ray nodes, nodes that come late or not at all, and a driver that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tpinference_engine.errors import RanksNotPlaced

if TYPE_CHECKING:
    from tests.engine.executor.conftest import Cluster, Group, Processes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

MakeGroup = Callable[..., "Group"]


@pytest.mark.parametrize("transport", ["compiled-graph", "actor-call"])
def test_ranks_are_spread_over_the_workers_and_not_the_head(
    transport: str, cluster: Cluster, make_group: MakeGroup
) -> None:
    group = make_group(ray_address=cluster.address, ranks_per_node=1, step_transport=transport)
    group.start()
    nodes = {place.node for place in group.executor.places}
    assert len(nodes) == 2 and cluster.head_id not in nodes
    assert group.echo(20) == group.predict(20)


def test_ranks_share_one_node_when_they_fit(cluster: Cluster, make_group: MakeGroup) -> None:
    group = make_group(ray_address=cluster.address)
    group.start()
    assert len({place.node for place in group.executor.places}) == 1


def test_engine_waits_for_a_worker_that_comes_late(
    make_cluster: Callable[[], Cluster], make_group: MakeGroup
) -> None:
    cluster = make_cluster()
    group = make_group(ray_address=cluster.address, ranks_per_node=1)
    late = threading.Timer(3.0, lambda: (cluster.add_worker(), cluster.add_worker()))
    late.start()
    group.start()
    late.join()
    assert group.echo(2) == group.predict(2)


def test_missing_worker_is_told_at_the_deadline(cluster: Cluster, make_group: MakeGroup) -> None:
    group = make_group(
        ray_address=cluster.address,
        tensor_parallel_size=3,
        ranks_per_node=1,
        startup_timeout_s=4.0,
    )
    with pytest.raises(RanksNotPlaced, match="want 3 Ray nodes with room for 1 ranks each"):
        group.start()


def test_cluster_that_does_not_answer_is_told_at_the_deadline(make_group: MakeGroup) -> None:
    group = make_group(ray_address="127.0.0.1:1", startup_timeout_s=3.0)
    with pytest.raises(RanksNotPlaced, match="no Ray cluster at '127.0.0.1:1'"):
        group.start()


def test_local_ray_is_started_and_leaves_nothing(
    make_group: MakeGroup, processes: Processes
) -> None:
    """Its authentication stays with this process, so no later test here can join a cluster."""
    shared_before = processes.shared_memory()
    children_before = processes.descendants(os.getpid())
    handler = signal.getsignal(signal.SIGTERM)
    group = make_group()
    group.start()
    assert group.echo(4) == group.predict(4)
    assert signal.getsignal(signal.SIGTERM) is handler
    started = processes.descendants(os.getpid()) - children_before
    assert set(group.pids) <= started

    group.executor.shutdown()

    processes.wait_until_ended(started, 10)
    assert processes.shared_memory() <= shared_before
    assert not list(Path("/tmp").glob(f"tpinference-ray-{os.getpid()}-*"))


DRIVER = """
import sys, time
from pathlib import Path
from tpinference_engine.config import EngineConfig
from tpinference_engine.executor.factory import make_executor
from tpinference_engine.runner.echo import EchoRunner

def main():
    config = EngineConfig(
        model=Path("/"), served_model_name=("echo",), device="cpu", tensor_parallel_size=2,
        distributed_executor_backend=sys.argv[1], ray_address=sys.argv[2] or None,
    )
    executor = make_executor(config, 64, EchoRunner)
    executor.start(lambda stage: None)
    print(*(place.pid for place in executor.places), flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("kind", ["local", "cluster", "processes"])
def test_ranks_end_by_themselves_when_the_engine_core_is_killed(
    kind: str, tmp_path: Path, processes: Processes, request: pytest.FixtureRequest
) -> None:
    backend = "mp" if kind == "processes" else "ray"
    address = request.getfixturevalue("cluster").address if kind == "cluster" else ""
    program = tmp_path / "driver.py"
    program.write_text(DRIVER)
    command = [sys.executable, str(program), backend, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            ranks = {int(pid) for pid in driver.stdout.readline().split()}
            children = processes.descendants(driver.pid)
        finally:
            driver.kill()
    assert len(ranks) == 2

    processes.wait_until_ended(ranks, 5)
    # Ray's own agents try for a minute to tell the driver that its raylet has died.
    processes.wait_until_ended(children - processes.ray_agents(), 30)
