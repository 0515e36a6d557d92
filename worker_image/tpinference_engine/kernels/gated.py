# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""silu(gate) · up of a merged product, for batches that the product of few rows leaves to cuBLAS.

Roof: bytes. It reads both halves and writes one: 86 KiB a token at an MLP width of 14336 in
bfloat16, 4.9 µs for 256 tokens at 4.5 TB/s. Plain torch has two kernels and a third more bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpinference_engine.kernels.grid import has_pdl

_BLOCK = 1024


@triton.jit
def silu_times(gate, up):
    """Of float32; the caller rounds once, at the end."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _gated_kernel(merged, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < WIDTH
    gate = tl.load(merged + row * 2 * WIDTH + d, mask=inside, other=0)
    up = tl.load(merged + row * 2 * WIDTH + WIDTH + d, mask=inside, other=0)
    made = silu_times(gate.to(tl.float32), up.to(tl.float32))
    tl.store(out + row * WIDTH + d, made.to(gate.dtype), mask=inside)


def silu_gated(merged_TW: torch.Tensor) -> torch.Tensor:
    """`merged_TW` holds all gates, then all ups."""
    num_tokens, merged_width = merged_TW.shape
    width = merged_width // 2
    out_TM = torch.empty((num_tokens, width), dtype=merged_TW.dtype, device=merged_TW.device)
    if num_tokens:
        pdl = has_pdl(merged_TW.device)
        _gated_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
            merged_TW, out_TM, WIDTH=width, BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out_TM
