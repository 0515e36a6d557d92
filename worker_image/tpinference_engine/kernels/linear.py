# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Products of a few rows with a big matrix, its rows (outputs) dealt to programs; and silu · mul.

Roof: the matrix is read once: 11.1, 7.4, 51.7 and 25.8 µs for the four of a layer of Llama-3.1-8B
at 4.545 TB/s. What a library loses beside it is the ramp at both ends of each kernel. Here a
program has a few outputs and little to do, many are resident at once, and each reads its first part
of the matrix before it waits for the kernel before: the matrix does not depend on it.

One row is plain arithmetic: the matrix goes from memory to registers and nowhere else, and all that
fits is asked for at once. Up to `MAX_ROWS` rows it is that of the matrix units, fed by a pipeline
through shared memory, the inner dimension dealt to the warps of a program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpinference_engine.kernels.gated import silu_times
from tpinference_engine.kernels.grid import has_pdl, power_of_two

MAX_ROWS = 16
"""Of a batch: one tile of the matrix units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a product is cut. Chosen by measurement: see docs/performance.md."""

    block_n: int
    """Outputs of a program."""
    block_k: int
    """Of the inner dimension, at a time; of a batch, for each warp."""
    warps: int = 4
    stages: int = 1
    early: bool = False
    """Successors may start once all programs have started, not when they are about to end."""


@triton.jit
def _load_w(w, n, k, N, K: tl.constexpr, EVEN: tl.constexpr):
    at = w + n[:, None].to(tl.int64) * K + k[None, :]
    if EVEN:
        w_tile = tl.load(at)
    else:
        w_tile = tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0)
    return w_tile


@triton.jit
def _finish(  # noqa: PLR0913
    made, up, bias, n, N, GATED: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Bias and gate of one row of outputs, or of several in the last dimension of `made`."""
    if HAS_BIAS:
        made += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias + N + n, mask=n < N, other=0).to(tl.float32)
        made = silu_times(made, up)
    return made


@triton.jit
def _row_kernel(  # noqa: PLR0913
    x, w, bias, y, N, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    up_w = w + N.to(tl.int64) * K
    w_tile = _load_w(w, n, k, N, K, EVEN)
    if GATED:
        up_tile = _load_w(up_w, n, k, N, K, EVEN)
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
    x_tile = tl.load(x + k, mask=k < K, other=0).to(tl.float32)[None, :]
    # Products are added up where they are; threads meet once, at the end.
    made = w_tile.to(tl.float32) * x_tile
    up = made
    if GATED:
        up = up_tile.to(tl.float32) * x_tile
    for start in tl.static_range(BLOCK_K, K, BLOCK_K):
        w_tile = _load_w(w, n, start + k, N, K, EVEN)
        x_tile = tl.load(x + start + k, mask=start + k < K, other=0).to(tl.float32)[None, :]
        made += w_tile.to(tl.float32) * x_tile
        if GATED:
            up += _load_w(up_w, n, start + k, N, K, EVEN).to(tl.float32) * x_tile
    if PDL:
        if not EARLY:
            gdc_launch_dependents()
    out = _finish(tl.sum(made, 1), tl.sum(up, 1), bias, n, N, GATED, HAS_BIAS)
    tl.store(y + n, out.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _load_parts(w, n, k, N, K: tl.constexpr, EVEN: tl.constexpr):
    """[parts, outputs, inner]; `k` is [parts, 1, inner]."""
    at = w + n[None, :, None].to(tl.int64) * K + k
    if EVEN:
        w_tile = tl.load(at)
    else:
        w_tile = tl.load(at, mask=(n < N)[None, :, None] & (k < K), other=0)
    return w_tile


@triton.jit(do_not_specialize=["M"])
def _batch_kernel(  # noqa: PLR0913
    x, w, bias, y, M, N, y_stride, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part, inner = tl.arange(0, PARTS), tl.arange(0, BLOCK_K)
    k = part[:, None, None] * BLOCK_K + inner[None, None, :]
    up_w = w + N.to(tl.int64) * K
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
    x_at = x + m[None, :, None].to(tl.int64) * K + k
    made = tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    up = tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    for start in range(0, K, PARTS * BLOCK_K):
        inside = (m < M)[None, :, None] & (start + k < K)
        x_tile = tl.load(x_at + start, mask=(m < M)[None, :, None] if EVEN else inside, other=0)
        x_tile = tl.permute(x_tile, (0, 2, 1))
        made = tl.dot(_load_parts(w, n, start + k, N, K, EVEN), x_tile, made)
        if GATED:
            up = tl.dot(_load_parts(up_w, n, start + k, N, K, EVEN), x_tile, up)
    if PDL:
        if not EARLY:
            gdc_launch_dependents()
    made, up = tl.trans(tl.sum(made, 0)), tl.trans(tl.sum(up, 0))
    out = _finish(made, up, bias, n, N, GATED, HAS_BIAS)
    at = y + m[:, None].to(tl.int64) * y_stride + n[None, :]
    tl.store(at, out.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def fits(x_MK: torch.Tensor, w_NK: torch.Tensor) -> bool:
    """Rows of the matrix must begin where 16 bytes can be read at once."""
    return (
        0 < len(x_MK) <= MAX_ROWS
        and x_MK.dtype in (torch.bfloat16, torch.float16)
        and w_NK.shape[1] % 64 == 0
        and w_NK.is_contiguous()
    )


def row_linear(
    x_1K: torch.Tensor,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    y_1N: torch.Tensor,
    tiling: Tiling,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """x · wᵀ + bias of one row into `y_1N`, of any float dtype; if `gated`, silu of the first half
    times the second."""
    num_outputs, width = y_1N.shape[1], w_NK.shape[1]
    pdl = has_pdl(x_1K.device)
    block_k = min(tiling.block_k, power_of_two(width))
    _row_kernel[(triton.cdiv(num_outputs, tiling.block_n),)](
        x_1K, w_NK, w_NK if bias_N is None else bias_N, y_1N, num_outputs, K=width,
        BLOCK_N=tiling.block_n, BLOCK_K=block_k, GATED=gated, HAS_BIAS=bias_N is not None,
        EVEN=width % block_k == 0 and num_outputs % tiling.block_n == 0,
        EARLY=tiling.early, PDL=pdl, num_warps=tiling.warps, launch_pdl=pdl,
    )  # fmt: skip
    return y_1N


def batch_linear(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    y_MN: torch.Tensor,
    tiling: Tiling,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """As `row_linear`, of up to `MAX_ROWS` rows."""
    num_rows, num_outputs = y_MN.shape
    width, pdl = w_NK.shape[1], has_pdl(x_MK.device)
    step = tiling.warps * tiling.block_k
    _batch_kernel[(triton.cdiv(num_outputs, tiling.block_n),)](
        x_MK, w_NK, w_NK if bias_N is None else bias_N, y_MN,
        num_rows, num_outputs, y_MN.stride(0), K=width,
        ROWS=8 if num_rows <= 8 else MAX_ROWS, BLOCK_N=tiling.block_n,
        PARTS=tiling.warps, BLOCK_K=tiling.block_k, GATED=gated, HAS_BIAS=bias_N is not None,
        EVEN=width % step == 0 and num_outputs % tiling.block_n == 0,
        EARLY=tiling.early, PDL=pdl,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=pdl,
    )  # fmt: skip
    return y_MN
