"""Which part of the model a rank holds. Pure arithmetic over the configuration.

Heads are dealt by KV group (a KV head and the query heads that read it), so the number of ranks
need not divide anything: 9 heads over 3 KV heads run on 2 ranks, with 2 groups and 1. With more
ranks than KV heads a KV head is replicated and its query heads are dealt among its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpinference_engine.errors import InvalidConfig
from tpinference_engine.model.config import ModelConfig

# Shards of the vocabulary are equal, so that gathering logits is one collective; padding fills up.
VOCAB_ALIGNMENT = 64
# The widest unit that the MLP is dealt in; GEMMs are slow on odd widths.
MLP_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range along one dimension of the whole model."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def times(self, width: int) -> Span:
        return Span(self.start * width, self.stop * width)

    def clip(self, most: int) -> Span:
        return Span(min(self.start, most), min(self.stop, most))


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    size: int
    heads: Span
    kv_heads: Span
    mlp: Span
    vocab: Span
    """Padded: may reach beyond the vocabulary."""


def shard_of(model: ModelConfig, rank: int, size: int) -> Shard:
    if size > model.num_heads:
        raise InvalidConfig(
            f"tensor_parallel_size is {size!r}, the model has {model.num_heads} attention heads "
            f"and allows 1 to {model.num_heads}"
        )
    heads, kv_heads = _deal_heads(model, rank, size)
    width = -(-model.vocab_size // size)
    width += -width % VOCAB_ALIGNMENT
    return Shard(
        rank=rank,
        size=size,
        heads=heads,
        kv_heads=kv_heads,
        mlp=_deal_mlp(model.intermediate_size, rank, size),
        vocab=Span(rank * width, (rank + 1) * width),
    )


def deal(count: int, rank: int, size: int) -> Span:
    """`count` things dealt to `size` ranks in order; the first ranks get one more."""
    each, rest = divmod(count, size)
    start = rank * each + min(rank, rest)
    return Span(start, start + each + (rank < rest))


def _deal_heads(model: ModelConfig, rank: int, size: int) -> tuple[Span, Span]:
    groups = model.num_kv_heads
    group_size = model.num_heads // groups
    if size <= groups:
        mine = deal(groups, rank, size)
        return mine.times(group_size), mine
    for group in range(groups):
        ranks = deal(size, group, groups)
        if ranks.start <= rank < ranks.stop:
            part = deal(group_size, rank - ranks.start, len(ranks))
            first = group * group_size
            return Span(first + part.start, first + part.stop), Span(group, group + 1)
    raise AssertionError(f"rank {rank} of {size} is in no group")


def _deal_mlp(width: int, rank: int, size: int) -> Span:
    unit = MLP_ALIGNMENT
    while unit > 1 and (width % unit or width // unit < size):
        unit //= 2
    return deal(width // unit, rank, size).times(unit)
