"""Every block is free or has one owner, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpinference_engine.scheduler.block_pool import BlockPool

NUM_BLOCKS = 9
moves = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 4)))


@given(moves)
def test_no_block_is_lost_or_shared(wanted: list[tuple[str, int]]) -> None:
    """-1 releases, anything else allocates if so many are free."""
    pool, owned = BlockPool(NUM_BLOCKS), dict.fromkeys("abc", 0)
    for owner, count in wanted:
        if count < 0:
            pool.release(owner)
            owned[owner] = 0
        elif count <= pool.num_free:
            before = pool.blocks_of(owner)
            pool.allocate(owner, count)
            owned[owner] += count
            assert pool.blocks_of(owner)[: len(before)] == before, "blocks keep their order"
        pool.check_integrity()
        assert {name: pool.num_owned(name) for name in "abc"} == owned
        assert pool.num_free == NUM_BLOCKS - sum(owned.values())


def test_more_than_is_free_is_our_own_mistake() -> None:
    pool = BlockPool(2)
    pool.allocate("a", 1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 are free"):
        pool.allocate("b", 2)


def test_blocks_from_a_number_on() -> None:
    pool = BlockPool(4)
    pool.allocate("a", 3)
    assert pool.blocks_of("a", 1) == (1, 2)
    assert pool.blocks_of("a", 3) == pool.blocks_of("nobody") == ()


def test_the_integrity_check_finds_a_block_that_is_used_twice() -> None:
    pool = BlockPool(2)
    pool.allocate("a", 1)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="{0: 2}"):
        pool.check_integrity()


def test_the_integrity_check_finds_a_lost_block() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(AssertionError, match="{1: 0}"):
        pool.check_integrity()
