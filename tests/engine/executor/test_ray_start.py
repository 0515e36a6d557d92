"""A Ray that can't be started or joined: named for what it is, with Ray's own words."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tpinference_engine.errors import RanksNotPlaced
from tpinference_engine.executor.deadline import Deadline
from tpinference_engine.executor.ray_cluster import RayCluster

TOO_LATE = "The current node timed out during startup. This could happen\nbecause of load."


@pytest.fixture
def listener() -> Iterator[str]:
    """Address of a port that takes connections, as a head does before it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("kind", [Exception, RuntimeError, OSError, ValueError])
def test_local_ray_that_does_not_start_says_why_and_what_helps(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**arguments: Any) -> None:
        raise kind(TOO_LATE)

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cluster = RayCluster(None, num_ranks=2)
    said = f"{kind.__name__}: The current node timed out during startup.*because of load"
    with pytest.raises(RanksNotPlaced, match=f"local Ray .*{said};.*ray_address.*'mp'"):
        cluster.join(Deadline.after(60))
    cluster.leave()
    assert list(tmp_path.iterdir()) == []


def test_local_ray_refuses_a_folder_whose_sockets_have_too_long_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    cluster = RayCluster(None, num_ranks=1)
    with pytest.raises(RanksNotPlaced, match="local Ray .*AF_UNIX path length"):
        cluster.join(Deadline.after(60))
    cluster.leave()
    assert list(folder.iterdir()) == []


def test_head_that_is_not_ready_is_asked_until_the_deadline(
    listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fail(address: str) -> None:
        asked.append(address)
        raise Exception("Head node temp_dir not found in NodeInfo")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(RanksNotPlaced, match=f"no Ray cluster at '{listener}': .*temp_dir"):
        RayCluster(listener, num_ranks=1).join(Deadline.after(1.5))
    assert asked == [listener] * 2
