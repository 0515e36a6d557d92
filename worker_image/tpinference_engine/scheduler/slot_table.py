"""Which rows of the ranks' batch state are taken, and by which generation.

A generation is one use of one slot. It travels with every row, so that a late result of a former
use is recognised. Ranks hear of a free slot with the next call that is sent.
"""

from __future__ import annotations

import heapq

MAX_GENERATION = 2**31 - 1


class SlotTable:
    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._generations = [0] * num_slots
        self._untold: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> tuple[int, int]:
        """The lowest free slot and its new generation."""
        slot = heapq.heappop(self._free)
        generation = self._generations[slot] % MAX_GENERATION + 1
        self._generations[slot] = generation
        return slot, generation

    def release(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} is free already"
        heapq.heappush(self._free, slot)
        self._untold.append(slot)

    def take_untold(self) -> tuple[int, ...]:
        """Slots released since the last call, for its STATE part."""
        untold, self._untold = tuple(self._untold), []
        return untold
