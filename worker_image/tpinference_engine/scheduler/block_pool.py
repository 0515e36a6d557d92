"""Which request owns which blocks of the cache.

Numbers only: it does not know what a block holds, nor when one is needed. Blocks may be reused as
soon as they are free, since one device queue orders everything.
"""

from __future__ import annotations

from collections import Counter, deque


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._owned: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_of(self, owner: str, start: int = 0) -> tuple[int, ...]:
        """In the order of the owner's positions, from its block number `start`."""
        return tuple(self._owned.get(owner, [])[start:])

    def num_owned(self, owner: str) -> int:
        return len(self._owned.get(owner, ()))

    def allocate(self, owner: str, count: int) -> None:
        """Appends `count` blocks to the owner's. The caller has looked at `num_free`."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} are free"
        if count:
            self._owned.setdefault(owner, []).extend(self._free.popleft() for _ in range(count))

    def release(self, owner: str) -> None:
        """All blocks of `owner` are free again."""
        self._free.extend(self._owned.pop(owner, ()))

    def check_integrity(self) -> None:
        """Every block is free or has one owner. For tests; raises AssertionError."""
        uses = Counter(self._free)
        for blocks in self._owned.values():
            uses.update(blocks)
        wrong = {block: uses[block] for block in range(self._num_blocks) if uses[block] != 1}
        assert not wrong and len(uses) == self._num_blocks, f"blocks used other than once: {wrong}"
