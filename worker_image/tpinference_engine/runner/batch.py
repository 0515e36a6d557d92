"""The arrays of one step, made on the host: what SAMPLE, STATE and FORWARD read on the device.

Pure numpy. Rows of one token come first, so that attention takes them as one slice; the order of
the logits stays that of the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tpinference_engine.runner.slots import BlockPlaces, SampledRow
from tpinference_engine.step import ForwardRow

Longs = npt.NDArray[np.int64]
FROM_SLOT = -1
"""In place of a token id: the token that the slot sampled last."""
PADDING_POSITION = -1
"""Of columns that fill up a graph: they are computed and leave nothing."""


@dataclass(frozen=True, slots=True)
class SampleArrays:
    """One column a choice. Floats are float64, bit-cast, so that all travel in one copy."""

    columns: Longs
    """logits row, slot, seed, output index, top_k, temperature, top_p"""
    random_rows: Longs
    """Columns that are not greedy."""
    limited: bool
    """A row that is not greedy has top_k or top_p."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of several tokens: `first` is its place among the flat tokens."""

    slot: int
    first: int
    num_tokens: int
    start: int


@dataclass(frozen=True, slots=True)
class ForwardArrays:
    tokens: Longs
    """Columns: token id or FROM_SLOT, slot, position."""
    num_single: int
    """Rows of one token: the first columns of `tokens`."""
    longest_single: int
    """Positions that the longest of them sees."""
    chunks: tuple[Chunk, ...]
    logits_columns: Longs
    """Columns of `tokens` whose logits are wanted, in the message's order."""
    is_padded: bool = False

    @property
    def only_decodes(self) -> bool:
        """Every token is a row and its logits are wanted: then they are in the message's order."""
        num_tokens = int(self.tokens.shape[1])
        return 0 < self.num_single == num_tokens == len(self.logits_columns)

    @property
    def chunk_columns(self) -> Longs:
        """Columns: slot, place of its first token among those of all chunks, tokens, position."""
        columns = [(c.slot, c.first - self.num_single, c.num_tokens, c.start) for c in self.chunks]
        return np.array(columns, dtype=np.int64).reshape(-1, 4).T

    def padded(self, size: int) -> ForwardArrays:
        """Of steps that are `only_decodes`."""
        tokens = np.zeros((3, size), dtype=np.int64)
        tokens[2] = PADDING_POSITION
        tokens[:, : self.num_single] = self.tokens
        return replace(self, tokens=tokens, is_padded=True)


def sample_arrays(choices: Sequence[SampledRow]) -> SampleArrays:
    params = [choice.params for choice in choices]
    floats = np.array(
        [[p.temperature for p in params], [p.top_p for p in params]], dtype=np.float64
    )
    integers = np.array(
        [
            [choice.logits_row for choice in choices],
            [p.slot for p in params],
            [p.seed for p in params],
            [choice.output_index for choice in choices],
            [p.top_k for p in params],
        ],
        dtype=np.int64,
    )
    random = [p for p in params if p.temperature > 0]
    return SampleArrays(
        columns=np.concatenate((integers, floats.view(np.int64))),
        random_rows=np.flatnonzero(floats[0] > 0).astype(np.int64),
        limited=any(p.top_k > 0 or p.top_p < 1 for p in random),
    )


def append_array(placements: Sequence[BlockPlaces]) -> Longs:
    """Columns: slot, place in its block table, block."""
    if not placements:
        return np.zeros((3, 0), dtype=np.int64)
    counts = [len(placement.blocks) for placement in placements]
    slots = np.repeat([placement.slot for placement in placements], counts)
    places = [np.arange(p.first, p.first + len(p.blocks)) for p in placements]
    blocks = [block for placement in placements for block in placement.blocks]
    return np.stack((slots, np.concatenate(places), blocks)).astype(np.int64)


def forward_arrays(rows: Sequence[ForwardRow]) -> ForwardArrays:
    order = sorted(range(len(rows)), key=lambda index: rows[index].num_tokens > 1)
    columns: list[Longs] = []
    chunks: list[Chunk] = []
    last_column = np.zeros(len(rows), dtype=np.int64)
    at = 0
    for index in order:
        row = rows[index]
        count = row.num_tokens
        part = np.empty((3, count), dtype=np.int64)
        part[0] = row.tokens or FROM_SLOT
        part[1] = row.slot
        part[2] = np.arange(row.start, row.start + count)
        columns.append(part)
        if count > 1:
            chunks.append(Chunk(row.slot, at, count, row.start))
        at += count
        last_column[index] = at - 1
    wanted = [index for index, row in enumerate(rows) if row.wants_logits]
    return ForwardArrays(
        tokens=np.concatenate(columns, axis=1) if columns else np.zeros((3, 0), dtype=np.int64),
        num_single=len(rows) - len(chunks),
        longest_single=max((r.start + 1 for r in rows if r.num_tokens == 1), default=0),
        chunks=tuple(chunks),
        logits_columns=last_column[wanted],
    )


def all_single(num_rows: int) -> ForwardArrays:
    """The shape of a step of decodes; what its tokens are is on the device."""
    nothing = np.zeros(0, dtype=np.int64)
    return ForwardArrays(
        tokens=np.zeros((3, 0), dtype=np.int64),
        num_single=num_rows,
        longest_single=0,
        chunks=(),
        logits_columns=nothing,
    )
