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
    single = [row for row in rows if row.num_tokens == 1]
    several = [row for row in rows if row.num_tokens > 1]
    num_single = len(single)
    tokens = np.empty((3, num_single + sum(row.num_tokens for row in several)), dtype=np.int64)
    # Whole columns at once: a step may have hundreds of these rows, and few of the others.
    tokens[:, :num_single] = (
        [row.tokens[0] if row.tokens else FROM_SLOT for row in single],
        [row.slot for row in single],
        [row.start for row in single],
    )
    chunks: list[Chunk] = []
    at = num_single
    for row in several:
        stop = at + row.num_tokens
        tokens[0, at:stop] = row.tokens
        tokens[1, at:stop] = row.slot
        tokens[2, at:stop] = np.arange(row.start, row.start + row.num_tokens)
        chunks.append(Chunk(row.slot, at, row.num_tokens, row.start))
        at = stop
    return ForwardArrays(
        tokens=tokens,
        num_single=num_single,
        longest_single=max((row.start + 1 for row in single), default=0),
        chunks=tuple(chunks),
        logits_columns=_logits_columns(rows, chunks),
    )


def _logits_columns(rows: Sequence[ForwardRow], chunks: Sequence[Chunk]) -> Longs:
    """The last token's column of each row that wants logits, in the rows' order."""
    singles = iter(range(len(rows) - len(chunks)))
    lasts = iter([chunk.first + chunk.num_tokens - 1 for chunk in chunks])
    columns = [next(lasts if row.num_tokens > 1 else singles) for row in rows]
    wanted = [column for column, row in zip(columns, rows, strict=True) if row.wants_logits]
    return np.array(wanted, dtype=np.int64)


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
