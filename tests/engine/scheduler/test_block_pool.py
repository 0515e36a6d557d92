"""Every block is free or has owners, several only where its content is known, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpinference_engine.scheduler.block_pool import BlockPool
from tpinference_engine.scheduler.prefix_cache import PrefixCache

NUM_BLOCKS = 9
moves = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 4), st.booleans()))


def key(number: int) -> bytes:
    return bytes([number])


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache()


@given(moves)
def test_no_block_is_lost_or_shared_wrongly(wanted: list[tuple[str, int, bool]]) -> None:
    """-1 releases; anything else shares all of another owner's cached blocks that come first, or
    allocates if so many are free."""
    cache = PrefixCache()
    pool, owned = BlockPool(NUM_BLOCKS, cache), dict.fromkeys("abc", 0)
    for owner, count, is_cached in wanted:
        if count < 0:
            pool.release(owner)
            owned[owner] = 0
        elif owned[owner] == 0 and is_cached:
            shared = [b for b in pool.blocks_of("abc"[count % 3]) if b in cache]
            pool.share(owner, shared)
            owned[owner] = len(shared)
        elif count <= pool.num_free:
            before = pool.blocks_of(owner)
            pool.allocate(owner, count)
            owned[owner] += count
            assert pool.blocks_of(owner)[: len(before)] == before, "blocks keep their order"
            for block in pool.blocks_of(owner, len(before)) if is_cached else ():
                cache.add(key(block), block)
        pool.check_integrity()
        assert {name: pool.num_owned(name) for name in "abc"} == owned
        used = {block for name in "abc" for block in pool.blocks_of(name)}
        assert pool.num_free == NUM_BLOCKS - len(used)
        assert pool.num_in_use(range(NUM_BLOCKS)) == len(used)


def test_blank_blocks_are_taken_first_then_the_least_recently_used_and_tails_before_heads(
    cache: PrefixCache,
) -> None:
    pool = BlockPool(7, cache)
    pool.allocate("early", 3)
    pool.allocate("late", 2)
    pool.allocate("plain", 1)
    for block in range(5):
        cache.add(key(block), block)
    pool.release("late")
    pool.release("early")
    pool.release("plain")
    # 6 was never used, 5 has nothing worth keeping; then the late one's, from its tail.
    pool.allocate("all", 7)
    assert pool.blocks_of("all") == (6, 5, 4, 3, 2, 1, 0)
    assert len(cache) == 0
    pool.check_integrity()


def test_a_shared_block_is_free_when_its_last_owner_has_gone(cache: PrefixCache) -> None:
    pool = BlockPool(3, cache)
    pool.allocate("a", 2)
    cache.add(key(0), 0)
    pool.share("b", [0])
    pool.share("c", [0])
    assert (pool.num_free, pool.num_in_use([0, 2])) == (1, 1)
    pool.release("a")
    assert pool.num_free == 2
    pool.release("b")
    assert pool.num_free == 2
    pool.release("c")
    assert pool.num_free == 3
    pool.check_integrity()


def test_a_use_of_a_free_block_makes_it_the_most_recent(cache: PrefixCache) -> None:
    pool = BlockPool(3, cache)
    for owner, block in zip("abc", range(3), strict=True):
        pool.allocate(owner, 1)
        cache.add(key(block), block)
    for owner in "abc":
        pool.release(owner)
    pool.share("d", [0])
    assert pool.num_free == 2
    pool.release("d")
    pool.allocate("e", 3)
    assert pool.blocks_of("e") == (1, 2, 0)


def test_what_is_forgotten_is_not_kept_and_owners_keep_theirs(cache: PrefixCache) -> None:
    pool = BlockPool(3, cache)
    pool.allocate("a", 2)
    cache.add(key(0), 0)
    cache.add(key(1), 1)
    pool.share("b", [0])
    pool.release("a")
    pool.forget_cached()
    assert (len(cache), pool.num_free, pool.blocks_of("b")) == (0, 2, (0,))
    pool.release("b")
    pool.check_integrity()
    assert pool.num_free == 3


def test_more_than_is_free_is_our_own_mistake(cache: PrefixCache) -> None:
    pool = BlockPool(2, cache)
    pool.allocate("a", 1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 are free"):
        pool.allocate("b", 2)


def test_only_what_is_cached_is_shared_and_only_as_a_beginning(cache: PrefixCache) -> None:
    pool = BlockPool(2, cache)
    pool.allocate("a", 2)
    cache.add(key(0), 0)
    with pytest.raises(AssertionError, match=r"not all cached: \[0, 1\]"):
        pool.share("b", [0, 1])
    pool.share("b", [0])
    with pytest.raises(AssertionError, match="'b' has blocks already"):
        pool.share("b", [0])


def test_blocks_from_a_number_on(cache: PrefixCache) -> None:
    pool = BlockPool(4, cache)
    pool.allocate("a", 3)
    assert pool.blocks_of("a", 1) == (1, 2)
    assert pool.blocks_of("a", 3) == pool.blocks_of("nobody") == ()


def test_the_integrity_check_finds_a_block_that_is_used_and_free(cache: PrefixCache) -> None:
    pool = BlockPool(2, cache)
    pool.allocate("a", 1)
    pool._blank.append(0)
    with pytest.raises(AssertionError, match="block 0: 1 owners, or free"):
        pool.check_integrity()


def test_the_integrity_check_finds_a_lost_block(cache: PrefixCache) -> None:
    pool = BlockPool(2, cache)
    pool._blank.pop()
    with pytest.raises(AssertionError, match="block 1: 0 owners, or free"):
        pool.check_integrity()


def test_the_integrity_check_finds_an_owner_that_is_not_counted(cache: PrefixCache) -> None:
    pool = BlockPool(2, cache)
    pool.allocate("a", 1)
    pool._owned["b"] = [0]
    with pytest.raises(AssertionError, match="block 0 has not 1 owners"):
        pool.check_integrity()


def test_the_integrity_check_finds_a_block_shared_without_being_cached(cache: PrefixCache) -> None:
    pool = BlockPool(2, cache)
    pool.allocate("a", 1)
    cache.add(key(0), 0)
    pool.share("b", [0])
    cache.forget(0)
    with pytest.raises(AssertionError, match="block 0 is shared, and not cached"):
        pool.check_integrity()
