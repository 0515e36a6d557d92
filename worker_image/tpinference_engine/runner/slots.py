"""The host's picture of a rank's slots: refuses a step message that does not fit what came before.

Pure Python. It knows generations, positions and how many blocks a slot has, no tensor and no token.
Whatever it hands out is in the order of the message. After it raised, it is of no more use: the
message broke the protocol, which is fatal for the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tpinference_engine.errors import MessageCorrupt
from tpinference_engine.step import BlockAppend, ForwardRow, NewSlot, SampleRow, StepInput


@dataclass(frozen=True, slots=True)
class SlotLimits:
    num_slots: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int

    @property
    def max_blocks_per_slot(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One row of the pending logits and what its slot wants of it."""

    logits_row: int
    params: NewSlot
    output_index: int


@dataclass(frozen=True, slots=True)
class BlockPlaces:
    """Where appended blocks go in the slot's block table."""

    slot: int
    first: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class _Slot:
    params: NewSlot
    blocks: list[int] = field(default_factory=list)
    end: int | None = None
    """Positions below it are in the cache; None before the first FORWARD."""
    sampled: int | None = None
    """Position of the token it sampled last."""


@dataclass(frozen=True, slots=True)
class _PendingLogits:
    row: int
    generation: int
    position: int


class BatchSlots:
    def __init__(self, limits: SlotLimits) -> None:
        self._limits = limits
        self._slots: dict[int, _Slot] = {}
        self._pending: dict[int, _PendingLogits] = {}

    def sample(self, rows: Sequence[SampleRow]) -> list[SampledRow]:
        """SAMPLE: which of the pending logits to choose from. The others are dropped."""
        pending, self._pending = self._pending, {}
        choices: list[SampledRow] = []
        for row in rows:
            found = pending.pop(row.slot, None)
            if found is None or (found.generation, found.position) != (
                row.generation,
                row.position,
            ):
                raise MessageCorrupt(f"{row!r} names no pending logits, the slot has {found!r}")
            if choices and choices[-1].logits_row > found.row:
                raise MessageCorrupt(f"{row!r} is out of the order of the pending logits")
            slot = self._slot(row.slot, row.generation)
            slot.sampled = row.position
            index = row.position - slot.params.prompt_length
            if index < 0:
                raise MessageCorrupt(f"{row!r} is inside the prompt of {slot.params!r}")
            choices.append(SampledRow(found.row, slot.params, index))
        return choices

    def apply(self, step: StepInput) -> list[BlockPlaces]:
        """STATE: free slots, then new ones, then block appends."""
        for index in step.free:
            if self._slots.pop(index, None) is None:
                raise MessageCorrupt(f"slot {index} is freed but not in use")
        for new in step.new:
            if not 0 <= new.slot < self._limits.num_slots or new.slot in self._slots:
                raise MessageCorrupt(
                    f"{new!r} needs an unused slot below {self._limits.num_slots}, "
                    f"in use are {sorted(self._slots)!r}"
                )
            self._slots[new.slot] = _Slot(new)
        return [self._append(append) for append in step.appends]

    def forward(self, rows: Sequence[ForwardRow], bucket: int) -> None:
        """FORWARD: every row continues its slot, and its blocks cover it."""
        total = sum(row.num_tokens for row in rows)
        most = min(bucket, self._limits.max_num_batched_tokens)
        if total > most:
            raise MessageCorrupt(f"{total} tokens in FORWARD, at most {most} are allowed")
        if len({row.slot for row in rows}) != len(rows):
            raise MessageCorrupt("a slot has two rows in FORWARD")
        num_logits = 0
        for row in rows:
            slot = self._slot(row.slot, row.generation)
            self._check_row(row, slot)
            slot.end = row.start + row.num_tokens
            if row.wants_logits:
                self._pending[row.slot] = _PendingLogits(num_logits, row.generation, slot.end)
                num_logits += 1

    def blocks_of(self, slot: int) -> Sequence[int]:
        return self._slots[slot].blocks

    @property
    def in_use(self) -> Sequence[int]:
        return sorted(self._slots)

    def _slot(self, index: int, generation: int) -> _Slot:
        slot = self._slots.get(index)
        if slot is None or slot.params.generation != generation:
            raise MessageCorrupt(
                f"slot {index} of generation {generation} is named, "
                f"the rank has {slot.params if slot else None!r}"
            )
        return slot

    def _append(self, append: BlockAppend) -> BlockPlaces:
        slot = self._slots.get(append.slot)
        if slot is None:
            raise MessageCorrupt(f"blocks for slot {append.slot}, which is not in use")
        if any(not 0 <= block < self._limits.num_blocks for block in append.blocks):
            raise MessageCorrupt(f"{append!r} is outside of {self._limits.num_blocks} blocks")
        first = len(slot.blocks)
        if first + len(append.blocks) > self._limits.max_blocks_per_slot:
            raise MessageCorrupt(
                f"{append!r} gives the slot more than {self._limits.max_blocks_per_slot} blocks"
            )
        slot.blocks += append.blocks
        return BlockPlaces(append.slot, first, append.blocks)

    def _check_row(self, row: ForwardRow, slot: _Slot) -> None:
        if row.num_tokens < 1 or len(row.tokens) not in (0, row.num_tokens):
            raise MessageCorrupt(f"{row!r} has {len(row.tokens)} tokens")
        if slot.end is not None and row.start != slot.end or row.start < 0:
            raise MessageCorrupt(f"{row!r} does not continue its slot, which ends at {slot.end}")
        if not row.tokens and (row.num_tokens != 1 or slot.sampled != row.start):
            raise MessageCorrupt(f"{row!r} wants the token sampled at {slot.sampled}")
        end = row.start + row.num_tokens
        if end > len(slot.blocks) * self._limits.block_size or end > self._limits.max_model_len:
            raise MessageCorrupt(
                f"{row!r} ends at {end}, the slot has {len(slot.blocks)} blocks of "
                f"{self._limits.block_size} and max_model_len is {self._limits.max_model_len}"
            )
