# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Parts of the attention kernels: heads as the merged product left them, and places in the cache.

Layouts. Merged heads [token, query heads then key heads then value heads, width]; a cache
[block, token of the block, KV head, width]; block tables [slot, block of the slot].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(  # noqa: PLR0913
    heads,
    inside,
    d,
    position,
    cos,
    sin,
    norm,
    eps,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads [rows, width] normed if they are to be, then rotated, in float32.

    `heads` points at the first element of each row, `inside` says which elements exist. The other
    half of a head is read again rather than moved between threads; sines come signed.
    """
    swapped = (d + HEAD_DIM // 2) % HEAD_DIM
    x = tl.load(heads + d[None, :], mask=inside, other=0)
    y = tl.load(heads + swapped[None, :], mask=inside, other=0)
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    exists = d < HEAD_DIM
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        w_x = tl.load(norm + d, mask=exists, other=0).to(tl.float32)
        w_y = tl.load(norm + swapped, mask=exists, other=0).to(tl.float32)
        x = ((x * inverse).to(dtype).to(tl.float32) * w_x[None, :]).to(dtype).to(tl.float32)
        y = ((y * inverse).to(dtype).to(tl.float32) * w_y[None, :]).to(dtype).to(tl.float32)
    c = tl.load(cos + position * HEAD_DIM + d, mask=exists, other=0).to(tl.float32)
    s = tl.load(sin + position * HEAD_DIM + d, mask=exists, other=0).to(tl.float32)
    return x * c[None, :] + y * s[None, :]


@triton.jit
def cache_rows(  # noqa: PLR0913
    table,
    positions,
    exists,
    kv_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Where in a layer's cache each of a slot's positions begins. `table` is the slot's row."""
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=exists, other=0)
    places = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    return (places * NUM_KV + kv_head) * HEAD_DIM


@triton.jit
def ask(pointers):
    """Has the lines at `pointers` brought into L2, and waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
