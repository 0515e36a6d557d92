"""Keys of blocks: the same on every machine, and different whenever the content is."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpinference_engine.scheduler.prefix_cache import KeyChain, PrefixCache, next_key, root_key

ROOT = root_key(salt=None)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=30)


def chain(of: list[int], size: int = 4, root: bytes = ROOT) -> list[bytes]:
    return list(KeyChain(root, size).between(0, len(of) // size, of))


def test_a_key_is_defined_and_not_only_equal_to_itself() -> None:
    root = blake2b(b"\x00\x00\x00\x00\x00", digest_size=32).digest()
    assert root == ROOT
    first = blake2b(root + struct.pack("<4i", 1, 2, 3, 2**31 - 1), digest_size=32).digest()
    assert chain([1, 2, 3, 2**31 - 1]) == [first]


def test_roots_differ_by_salt_and_adapter() -> None:
    salts = [None, "", "a", "b", "a\0", "\ud800"]
    roots = {root_key(salt=salt, adapter_id=adapter) for salt in salts for adapter in (0, 1, 256)}
    assert len(roots) == len(salts) * 3


@given(tokens, tokens)
def test_two_chains_agree_exactly_as_far_as_their_tokens_do(one: list[int], two: list[int]) -> None:
    for at, (a, b) in enumerate(zip(chain(one), chain(two), strict=False)):
        assert (a == b) is (one[: 4 * at + 4] == two[: 4 * at + 4])


@given(tokens, st.integers(1, 5), st.data())
def test_a_chain_that_grows_is_the_one_made_at_once(
    of: list[int], size: int, data: st.DataObject
) -> None:
    growing = KeyChain(ROOT, size)
    for length in range(len(of) + 1):
        stop = data.draw(st.integers(0, length // size))
        first = data.draw(st.integers(0, stop))
        assert list(growing.between(first, stop, of[:length])) == chain(of, size)[first:stop]


def test_a_key_stands_for_all_before_it() -> None:
    assert next_key(ROOT, [1, 2]) != next_key(next_key(ROOT, [0]), [1, 2])
    assert chain([1, 2, 3, 4], size=2) != chain([1, 2, 3, 4], size=4)


def test_more_blocks_than_there_are_tokens_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="2 blocks of 4, 7 tokens"):
        KeyChain(ROOT, 4).between(0, 2, list(range(7)))


def test_the_longest_run_from_the_start_is_found() -> None:
    cache, keys = PrefixCache(), chain(list(range(16)))
    for block, key in zip((7, 5, 3, 1), keys, strict=True):
        cache.add(key, block)
    cache.forget(5)
    assert cache.longest(keys) == (7,)
    cache.add(keys[1], 5)
    assert cache.longest(keys) == (7, 5, 3, 1)
    assert cache.longest(keys[1:]) == (5, 3, 1), "it is given a chain from its start"
    cache.clear()
    assert (cache.longest(keys), len(cache)) == ((), 0)


def test_the_first_block_of_a_content_stays_the_one_that_is_found() -> None:
    cache = PrefixCache()
    cache.add(ROOT, 1)
    cache.add(ROOT, 2)
    assert (cache.longest([ROOT]), 1 in cache, 2 in cache) == ((1,), True, False)
