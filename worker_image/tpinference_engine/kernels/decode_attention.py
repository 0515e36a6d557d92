# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Attention of one new token a row over the paged cache: norm, rotation, cache write, all in one.

A program has one row, one KV head with all its query heads, and one of the parts that the context
is cut into. Shapes do not depend on the contexts, which are read on the device, so a graph can hold
it. The part that is done last puts the parts together; a row at position -1 is padding.

Roof: bytes, the context's keys and values once: 128 KiB a token for Llama-3.1-8B, so 0.59 ms a step
for 64 rows of 320 tokens at 4.5 TB/s. For one short row it is latency: a few loads in a chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpinference_engine.kernels.grid import has_pdl, num_multiprocessors, power_of_two
from tpinference_engine.kernels.heads import ask, cache_rows, rotated

MAX_PARTS = 16
_BLOCK_N, _WARPS, _STAGES = 64, 4, 3
_MIN_TILES = 1
"""Of a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheView:
    """One layer's cache and everybody's block tables."""

    keys_NBGK: torch.Tensor
    values_NBGK: torch.Tensor
    tables_SC: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """What a layer's merged heads are and what is done to them first."""

    num_heads: int
    num_kv_heads: int
    q_norm_K: torch.Tensor | None
    k_norm_K: torch.Tensor | None
    eps: float
    cos_PK: torch.Tensor
    sin_PK: torch.Tensor


class Arrivals:
    """Counts the finished parts of each row and KV head; zero between kernels."""

    def __init__(self, max_rows: int, num_kv_heads: int, device: torch.device) -> None:
        self.counts = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)


@triton.jit
def _prefetch(  # noqa: PLR0913
    first, stop, table, keys, values, kv_head,
    BLOCK_SIZE: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Asks for a part's first tile: when it is read it is in L2. More of them gain nothing."""
    LINE: tl.constexpr = 128 // (keys.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (HEAD_DIM + LINE - 1) // LINE
    positions = first + tl.arange(0, BLOCK_N)
    exists = positions < stop
    at = cache_rows(table, positions, exists, kv_head, BLOCK_SIZE, NUM_KV, HEAD_DIM)
    # Where nothing is to be read, the layer's first line is asked for, which is harmless.
    at = tl.where(exists, at, 0)
    for line in tl.static_range(LINES):
        ask(keys + at + line * LINE)
        ask(values + at + line * LINE)


@triton.jit
def _visit(  # noqa: PLR0913
    q, most, total, acc, first, stop, table, keys, values, kv_head, scale,
    BLOCK_SIZE: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The online softmax over positions `first` to `stop`; scores are powers of two."""
    d = tl.arange(0, BLOCK_D)
    for start in range(first, stop, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        exists = positions < stop
        at = cache_rows(table, positions, exists, kv_head, BLOCK_SIZE, NUM_KV, HEAD_DIM)
        offsets = at[:, None] + d[None, :]
        # What is beyond the context is never read: a former owner may have left a NaN there.
        inside = exists[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + offsets, mask=inside, other=0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(exists[None, :], scores, float("-inf"))
        most_next = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - most_next[:, None])
        shrink = tl.exp2(most - most_next)
        v = tl.load(values + offsets, mask=inside, other=0)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        most = most_next
    return most, total, acc


@triton.jit
def _new_token(  # noqa: PLR0913
    q, qkv_row, position, table, keys, values, kv_head, cos, sin, k_norm, eps, scale,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Writes the row's own key and value into the cache, and begins the softmax with them."""
    one = tl.arange(0, 1)
    d = tl.arange(0, BLOCK_D)
    inside = (one[:, None] == 0) & (d < HEAD_DIM)[None, :]
    k_row = qkv_row + (NUM_HEADS + kv_head + one)[:, None] * HEAD_DIM
    v_row = qkv_row + (NUM_HEADS + NUM_KV + kv_head + one)[:, None] * HEAD_DIM
    k = rotated(k_row, inside, d, position, cos, sin, k_norm, eps, HEAD_DIM, HAS_NORM)
    k = k.to(q.dtype)
    v = tl.load(v_row + d[None, :], mask=inside, other=0)
    exists = one == 0
    at = cache_rows(table, position + one, exists, kv_head, BLOCK_SIZE, NUM_KV, HEAD_DIM)
    tl.store(keys + at[:, None] + d[None, :], k, mask=inside)
    tl.store(values + at[:, None] + d[None, :], v, mask=inside)
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
    acc = tl.zeros_like(q).to(tl.float32) + v.to(tl.float32)
    return score, tl.full(score.shape, 1.0, tl.float32), acc


@triton.jit
def _gather_parts(  # noqa: PLR0913
    parts_o, parts_ml, row_group, h, num_active,
    PARTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The whole row out of its parts: they come past this program's own cache, hence `.cg`."""
    d = tl.arange(0, BLOCK_D)
    p = tl.arange(0, PARTS)
    at = (row_group * PARTS + p)[:, None] * BLOCK_H + h[None, :]
    done = (p < num_active)[:, None] & (h >= 0)[None, :]
    mosts = tl.load(parts_ml + 2 * at, mask=done, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(parts_ml + 2 * at + 1, mask=done, other=0.0, cache_modifier=".cg")
    most = tl.max(mosts, 0)
    total = tl.sum(totals * tl.exp2(mosts - most[None, :]), 0)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for part in tl.static_range(PARTS):
        place = (row_group * PARTS + part) * BLOCK_H + h
        exists = (part < num_active) & (h >= 0)
        at_ml = parts_ml + 2 * place
        own = tl.load(at_ml, mask=exists, other=float("-inf"), cache_modifier=".cg")
        o = tl.load(
            parts_o + place[:, None] * BLOCK_D + d[None, :],
            mask=exists[:, None] & (d >= 0)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += o * tl.exp2(own - most)[:, None]
    return acc / total[:, None]


# Slots and positions are pieces of one buffer, which begin anywhere: one compilation for all.
@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _decode_kernel(  # noqa: PLR0913
    qkv, out, keys, values, tables, slots, positions, cos, sin, q_norm, k_norm,
    parts_o, parts_ml, arrivals, table_stride, scale, eps,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_NORM: tl.constexpr, PARTS: tl.constexpr,
    MIN_TILES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV
    position = tl.load(positions + row).to(tl.int32)
    num_tiles = tl.cdiv(position, BLOCK_N)
    tiles_of_part = tl.maximum(tl.cdiv(num_tiles, PARTS), MIN_TILES)
    num_active = tl.maximum(tl.cdiv(num_tiles, tiles_of_part), 1)
    first = part * tiles_of_part * BLOCK_N
    stop = tl.minimum(first + tiles_of_part * BLOCK_N, position)
    table = tables + tl.load(slots + row) * table_stride
    if PDL:
        gdc_launch_dependents()
        # The context was there before the step; only the heads come from the kernel before.
        _prefetch(first, stop, table, keys, values, kv_head, BLOCK_SIZE, NUM_KV, HEAD_DIM, BLOCK_N)
        gdc_wait()
    if (position < 0) | (part >= num_active):
        return
    qkv_row = qkv + row.to(tl.int64) * (NUM_HEADS + 2 * NUM_KV) * HEAD_DIM
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (h < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_rows = qkv_row + (kv_head * GROUP + h)[:, None] * HEAD_DIM
    q = rotated(q_rows, inside, d, position, cos, sin, q_norm, eps, HEAD_DIM, HAS_NORM)
    q = q.to(qkv.dtype.element_ty)
    most = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if part == 0:
        most, total, acc = _new_token(
            q, qkv_row, position, table, keys, values, kv_head, cos, sin, k_norm, eps, scale,
            NUM_HEADS, NUM_KV, HEAD_DIM, BLOCK_SIZE, BLOCK_D, HAS_NORM,
        )  # fmt: skip
    most, total, acc = _visit(
        q, most, total, acc, first, stop, table, keys, values, kv_head, scale,
        BLOCK_SIZE, NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    out_at = out + ((row * NUM_HEADS + kv_head * GROUP + h) * HEAD_DIM)[:, None] + d[None, :]
    if num_active == 1:
        tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        row_group = row * NUM_KV + kv_head
        place = (row_group * PARTS + part) * BLOCK_H + h
        tl.store(parts_o + place[:, None] * BLOCK_D + d[None, :], acc)
        tl.store(parts_ml + 2 * place, most)
        tl.store(parts_ml + 2 * place + 1, total)
        # All of this program's stores come before its arrival.
        tl.debug_barrier()
        before = tl.atomic_add(arrivals + row_group, 1, sem="acq_rel")
        if before == num_active - 1:
            tl.store(arrivals + row_group, 0)
            whole = _gather_parts(
                parts_o, parts_ml, row_group, h, num_active, PARTS, BLOCK_H, BLOCK_D
            )
            tl.store(out_at, whole.to(out.dtype.element_ty), mask=inside)


def num_parts(num_rows: int, num_kv_heads: int, device: torch.device) -> int:
    """Enough programs for every multiprocessor, and no more parts than that."""
    wanted = 2 * num_multiprocessors(device) // max(1, num_rows * num_kv_heads)
    return max(1, min(MAX_PARTS, power_of_two(wanted + 1) // 2))


def decode_attention(
    qkv_TNK: torch.Tensor,
    layout: HeadLayout,
    cache: CacheView,
    where: tuple[torch.Tensor, torch.Tensor],
    arrivals: Arrivals,
    parts: int,
) -> torch.Tensor:
    """`where` is each row's slot and position. Keys and values of the rows are stored, too."""
    num_rows, num_merged, width = qkv_TNK.shape
    heads, kv_heads = layout.num_heads, layout.num_kv_heads
    assert num_merged == heads + 2 * kv_heads and qkv_TNK.is_contiguous(), "merged heads"
    slots_T, positions_T = where
    out_THK = torch.empty((num_rows, heads, width), dtype=qkv_TNK.dtype, device=qkv_TNK.device)
    if not num_rows:
        return out_THK
    block_h, block_d = power_of_two(heads // kv_heads, 16), power_of_two(width, 16)
    wide = qkv_TNK.dtype == torch.float32
    slices = num_rows * kv_heads * parts * block_h
    parts_o = torch.empty((slices, block_d), dtype=torch.float32, device=qkv_TNK.device)
    parts_ml = torch.empty((slices, 2), dtype=torch.float32, device=qkv_TNK.device)
    pdl = has_pdl(qkv_TNK.device)
    _decode_kernel[(parts, kv_heads, num_rows)](
        qkv_TNK, out_THK, cache.keys_NBGK, cache.values_NBGK, cache.tables_SC,
        slots_T, positions_T, layout.cos_PK, layout.sin_PK,
        qkv_TNK if layout.q_norm_K is None else layout.q_norm_K,
        qkv_TNK if layout.k_norm_K is None else layout.k_norm_K,
        parts_o, parts_ml, arrivals.counts, cache.tables_SC.stride(0),
        width**-0.5 * 1.4426950408889634, layout.eps,
        NUM_HEADS=heads, NUM_KV=kv_heads, HEAD_DIM=width,
        BLOCK_SIZE=cache.keys_NBGK.shape[1], HAS_NORM=layout.q_norm_K is not None,
        PARTS=parts, MIN_TILES=_MIN_TILES, BLOCK_H=block_h, BLOCK_D=block_d,
        BLOCK_N=32 if wide else _BLOCK_N, PDL=pdl,
        num_warps=_WARPS, num_stages=2 if wide else _STAGES, launch_pdl=pdl,
    )  # fmt: skip
    return out_THK
