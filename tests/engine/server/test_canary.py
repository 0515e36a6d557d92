"""The canary counts: what is not known yet is not fresh."""

from __future__ import annotations

import pytest

from tpinference_engine.errors import StepTimedOut
from tpinference_engine.server.canary import Canary


class Ranks:
    """Where canaries are sent."""

    def __init__(self) -> None:
        self.limits: list[float] = []
        self.hangs = False

    async def send(self, timeout_s: float) -> None:
        self.limits.append(timeout_s)
        if self.hangs:
            raise StepTimedOut("no token")


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def canary(ranks: Ranks) -> Canary:
    return Canary(ranks.send, interval_s=1.0, timeout_s=3.0, failure_threshold=2)


async def test_it_is_not_fresh_before_the_first_came_back(canary: Canary, ranks: Ranks) -> None:
    assert not canary.is_fresh
    ranks.hangs = True
    with pytest.raises(StepTimedOut):
        await canary.pass_first(60.0)
    assert not canary.is_fresh
    ranks.hangs = False
    await canary.pass_first(60.0)
    assert canary.is_fresh
    assert ranks.limits == [60.0, 60.0]


async def test_failures_in_a_row_make_it_stale_and_one_success_fresh(
    canary: Canary, ranks: Ranks
) -> None:
    await canary.pass_first(60.0)
    ranks.hangs = True
    seen = []
    for _ in range(3):
        await canary.try_once()
        seen.append((canary.num_failures, canary.is_fresh))
    assert seen == [(1, True), (2, False), (3, False)]
    ranks.hangs = False
    await canary.try_once()
    assert (canary.num_failures, canary.is_fresh) == (0, True)
    assert ranks.limits[1:] == [3.0] * 4
