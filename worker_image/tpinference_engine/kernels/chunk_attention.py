# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Attention of rows of several tokens over the paged cache, and what comes before it.

`store_heads` norms and rotates, puts keys and values into the cache and queries beside it;
`chunk_attention` then sees a chunk's own tokens and what was there before alike, through the block
table, so nothing is gathered into one piece and no mask is made.

Roof: arithmetic. 4 · tokens · context · query heads · width, half of the own part of it: 0.10 TFLOP
a layer for 2048 tokens after 2048 of Llama-3.1-8B, 0.13 ms at 790 TFLOP/s. This reaches 0.29 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpinference_engine.kernels.decode_attention import CacheView, HeadLayout
from tpinference_engine.kernels.grid import has_pdl, power_of_two
from tpinference_engine.kernels.heads import cache_rows, rotated


@dataclass(frozen=True, slots=True)
class _Cut:
    block_m: int
    block_n: int
    warps: int
    stages: int


# Measured on one H200: docs/performance.md. From a length on.
_CUTS = {0: _Cut(64, 64, 4, 3), 65: _Cut(128, 64, 8, 2), 1024: _Cut(128, 64, 4, 3)}
LENGTHS = tuple(max(2, length) for length in _CUTS)
"""One of each cut, for who wants them compiled."""


def _cut(dtype: torch.dtype, longest: int) -> _Cut:
    if dtype == torch.float32:
        return _Cut(32, 32, 4, 2)
    return _CUTS[max(length for length in _CUTS if length <= longest)]


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _store_kernel(  # noqa: PLR0913
    qkv, out_q, keys, values, tables, slots, positions, cos, sin, q_norm, k_norm,
    table_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV
    position = tl.load(positions + row).to(tl.int32)
    table = tables + tl.load(slots + row) * table_stride
    qkv_row = qkv + row * (NUM_HEADS + 2 * NUM_KV) * HEAD_DIM
    h, d, one = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, 1)
    inside = (h < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_at = (kv_head * GROUP + h)[:, None] * HEAD_DIM
    q = rotated(qkv_row + q_at, inside, d, position, cos, sin, q_norm, eps, HEAD_DIM, HAS_NORM)
    at = out_q + row * NUM_HEADS * HEAD_DIM + q_at + d[None, :]
    tl.store(at, q.to(out_q.dtype.element_ty), mask=inside)
    inside_one = (one[:, None] == 0) & (d < HEAD_DIM)[None, :]
    k_row = qkv_row + (NUM_HEADS + kv_head + one)[:, None] * HEAD_DIM
    v_row = qkv_row + (NUM_HEADS + NUM_KV + kv_head + one)[:, None] * HEAD_DIM
    k = rotated(k_row, inside_one, d, position, cos, sin, k_norm, eps, HEAD_DIM, HAS_NORM)
    v = tl.load(v_row + d[None, :], mask=inside_one, other=0)
    exists = one == 0
    place = cache_rows(table, position + one, exists, kv_head, BLOCK_SIZE, NUM_KV, HEAD_DIM)
    tl.store(keys + place[:, None] + d[None, :], k.to(v.dtype), mask=inside_one)
    tl.store(values + place[:, None] + d[None, :], v, mask=inside_one)


@triton.jit
def _span(  # noqa: PLR0913
    q, most, total, acc, first, stop, end, query_positions, table, keys, values, kv_head, scale,
    BLOCK_SIZE: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax over positions `first` to `stop`; from `end` on nothing exists."""
    d = tl.arange(0, BLOCK_D)
    for start in range(first, stop, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        exists = positions < end
        at = cache_rows(table, positions, exists, kv_head, BLOCK_SIZE, NUM_KV, HEAD_DIM)
        offsets = at[:, None] + d[None, :]
        inside = exists[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + offsets, mask=inside, other=0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            seen = positions[None, :] <= query_positions[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        most_next = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - most_next[:, None])
        shrink = tl.exp2(most - most_next)
        v = tl.load(values + offsets, mask=inside, other=0)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        most = most_next
    return most, total, acc


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["chunks"])
def _chunk_kernel(  # noqa: PLR0913
    queries, out, keys, values, tables, chunks, num_chunks, table_stride, scale,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head, chunk = tl.program_id(0), tl.program_id(1)
    # The last queries see most and begin first.
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    slot = tl.load(chunks + chunk)
    token = tl.load(chunks + num_chunks + chunk)
    count = tl.load(chunks + 2 * num_chunks + chunk).to(tl.int32)
    begin = tl.load(chunks + 3 * num_chunks + chunk).to(tl.int32)
    if tile * BLOCK_M >= count:
        return
    table = tables + slot * table_stride
    kv_head = head // (NUM_HEADS // NUM_KV)
    rows, d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    inside = (rows < count)[:, None] & (d < HEAD_DIM)[None, :]
    at = ((token + rows) * NUM_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(queries + at, mask=inside, other=0)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Rows that are none see what the last one sees: nothing of theirs is kept.
    query_positions = begin + tl.minimum(rows, count - 1)
    end = begin + tl.minimum((tile + 1) * BLOCK_M, count)
    full = (begin + tile * BLOCK_M) // BLOCK_N * BLOCK_N
    most, total, acc = _span(
        q, most, total, acc, 0, full, end, query_positions, table, keys, values, kv_head, scale,
        BLOCK_SIZE, NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, False,
    )  # fmt: skip
    most, total, acc = _span(
        q, most, total, acc, full, end, end, query_positions, table, keys, values, kv_head, scale,
        BLOCK_SIZE, NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, True,
    )  # fmt: skip
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def store_heads(
    qkv_TNK: torch.Tensor,
    layout: HeadLayout,
    cache: CacheView,
    where: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Queries, ready; keys and values are in the cache. `where` is each token's slot, position."""
    num_tokens, num_merged, width = qkv_TNK.shape
    heads, kv_heads = layout.num_heads, layout.num_kv_heads
    assert num_merged == heads + 2 * kv_heads and qkv_TNK.is_contiguous(), "merged heads"
    q_THK = torch.empty((num_tokens, heads, width), dtype=qkv_TNK.dtype, device=qkv_TNK.device)
    pdl = has_pdl(qkv_TNK.device)
    _store_kernel[(num_tokens, kv_heads)](
        qkv_TNK, q_THK, cache.keys_NBGK, cache.values_NBGK, cache.tables_SC, *where,
        layout.cos_PK, layout.sin_PK,
        qkv_TNK if layout.q_norm_K is None else layout.q_norm_K,
        qkv_TNK if layout.k_norm_K is None else layout.k_norm_K,
        cache.tables_SC.stride(0), layout.eps,
        NUM_HEADS=heads, NUM_KV=kv_heads, HEAD_DIM=width, BLOCK_SIZE=cache.keys_NBGK.shape[1],
        HAS_NORM=layout.q_norm_K is not None, BLOCK_H=power_of_two(heads // kv_heads),
        BLOCK_D=power_of_two(width), PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return q_THK


def chunk_attention(
    q_THK: torch.Tensor, cache: CacheView, chunks_4C: torch.Tensor, longest: int
) -> torch.Tensor:
    """`chunks_4C`: slot, first token in `q_THK`, tokens, position of the first; `longest` = most
    tokens of one."""
    heads, width = q_THK.shape[1:]
    kv_heads = cache.keys_NBGK.shape[2]
    out_THK = torch.empty_like(q_THK)
    num_chunks = chunks_4C.shape[1]
    cut = _cut(q_THK.dtype, longest)
    pdl = has_pdl(q_THK.device)
    _chunk_kernel[(heads, num_chunks, triton.cdiv(longest, cut.block_m))](
        q_THK, out_THK, cache.keys_NBGK, cache.values_NBGK, cache.tables_SC,
        chunks_4C, num_chunks, cache.tables_SC.stride(0), width**-0.5 * 1.4426950408889634,
        NUM_HEADS=heads, NUM_KV=kv_heads, HEAD_DIM=width, BLOCK_SIZE=cache.keys_NBGK.shape[1],
        BLOCK_M=cut.block_m, BLOCK_D=power_of_two(width, 16), BLOCK_N=cut.block_n, PDL=pdl,
        num_warps=cut.warps, num_stages=cut.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out_THK
