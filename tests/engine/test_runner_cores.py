"""Cores are what the container may use, not what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpinference_engine.runner.cores import threads_of_rank, usable_cores


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("9900000 100000", None)],
    ids=["one core", "half a core", "no limit", "more than there are"],
)
def test_container_limit_counts(tmp_path: Path, text: str, expected: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path / "cpu.max") == (expected or len(os.sched_getaffinity(0)))


def test_without_a_limit_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "cpu.max") == len(os.sched_getaffinity(0))


def test_ranks_of_a_node_share_its_cores() -> None:
    assert [threads_of_rank(ranks, 8) for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
