"""Which request owns which blocks of the cache, and which block is taken next.

Numbers only: it does not know what a block holds. Blocks may be reused as soon as they are free,
since one device queue orders everything. A block that the prefix cache knows may have several
owners, and stays findable when it is free, until it is taken for something else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from tpinference_engine.scheduler.prefix_cache import PrefixCache


class BlockPool:
    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self._cache = cache
        self._num_owners = [0] * num_blocks
        self._owned: dict[str, list[int]] = {}
        # Free ones: with nothing to lose, and (least recently used first) with a cached prefix.
        self._blank = deque(range(num_blocks))
        self._cached: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    def num_in_use(self, blocks: Sequence[int]) -> int:
        """Those of `blocks` that have an owner, and so cost nothing to share."""
        return sum(self._num_owners[block] > 0 for block in blocks)

    def blocks_of(self, owner: str, start: int = 0) -> tuple[int, ...]:
        """In the order of the owner's positions, from its block number `start`."""
        return tuple(self._owned.get(owner, [])[start:])

    def num_owned(self, owner: str) -> int:
        return len(self._owned.get(owner, ()))

    def share(self, owner: str, blocks: Sequence[int]) -> None:
        """Cached blocks become the first ones of an owner that has none."""
        assert owner not in self._owned, f"{owner!r} has blocks already"
        assert all(block in self._cache for block in blocks), f"not all cached: {blocks!r}"
        for block in blocks:
            self._cached.pop(block, None)
        self._give(owner, blocks)

    def allocate(self, owner: str, count: int) -> None:
        """Appends `count` blocks to the owner's. The caller has looked at `num_free`."""
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        self._give(owner, [self._take() for _ in range(count)])

    def release(self, owner: str) -> None:
        """`owner` has no blocks any more. The last of them lose what they hold before the first:
        a prefix is of use without what follows, and never the reverse."""
        for block in reversed(self._owned.pop(owner, [])):
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            if block in self._cache:
                self._cached[block] = None
            else:
                self._blank.append(block)

    def forget_cached(self) -> None:
        """No block is found any more; owners keep theirs."""
        self._cache.clear()
        self._blank.extend(self._cached)
        self._cached.clear()

    def _give(self, owner: str, blocks: Sequence[int]) -> None:
        if blocks:
            self._owned.setdefault(owner, []).extend(blocks)
        for block in blocks:
            self._num_owners[block] += 1

    def _take(self) -> int:
        if self._blank:
            return self._blank.popleft()
        block = next(iter(self._cached))
        del self._cached[block]
        self._cache.forget(block)
        return block

    def check_integrity(self) -> None:
        """Every block is free once or has owners, several only if cached. For tests; raises
        AssertionError."""
        free = Counter([*self._blank, *self._cached])
        owners = Counter(block for blocks in self._owned.values() for block in blocks)
        for block, counted in enumerate(self._num_owners):
            assert owners.pop(block, 0) == counted, f"block {block} has not {counted} owners"
            assert free.pop(block, 0) == (counted == 0), f"block {block}: {counted} owners, or free"
            assert counted < 2 or block in self._cache, f"block {block} is shared, and not cached"
        assert not owners and not free, f"blocks that are none: {owners!r} {free!r}"
        assert all(block in self._cache for block in self._cached), "an uncached block kept as such"
        assert not any(block in self._cache for block in self._blank), "a cached block kept blank"
