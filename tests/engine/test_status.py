"""What a status says of the ranks: a group ends as a whole."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.messages import CoreReady
from tpinference_engine.engine.status import Failure
from tpinference_engine.engine.status_board import StatusBoard
from tpinference_engine.executor.base import RankPlace
from tpinference_engine.scheduler.limits import SchedulerLimits


@pytest.fixture
def board(make_config: Callable[..., EngineConfig]) -> StatusBoard:
    limits = SchedulerLimits(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_num_requests=4,
        max_model_len=16,
        block_size=4,
        num_blocks=8,
        vocab_size=9,
        eos_token_ids=(),
    )
    places = tuple(RankPlace(rank, f"pod-{rank}", "n", "cpu", rank) for rank in range(3))
    board = StatusBoard(make_config())
    board.hear(CoreReady(1.0, limits, places))
    return board


def states(board: StatusBoard) -> list[str]:
    return [rank.state for rank in board.status().ranks]


@pytest.mark.parametrize("rank", [1, None], ids=["one-was-first", "the-core-crashed"])
def test_all_ranks_of_a_failed_group_are_dead(board: StatusBoard, rank: int | None) -> None:
    assert states(board) == ["alive"] * 3
    board.fail(Failure(reason="GroupFailed", message="m", time=datetime.now(UTC), rank=rank))
    assert states(board) == ["dead"] * 3
    failure = board.status().last_failure
    assert failure is not None and failure.rank == rank


@pytest.mark.parametrize(("state", "expected"), [("draining", "alive"), ("stopped", "dead")])
def test_ranks_live_through_a_drain_and_end_with_the_core(
    board: StatusBoard, state: str, expected: str
) -> None:
    board.state = state  # type: ignore[assignment]
    assert states(board) == [expected] * 3
