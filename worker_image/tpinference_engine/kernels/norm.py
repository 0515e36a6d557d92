# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""RMSNorm of the sum of the residual stream and what the last block adds to it.

Roof: bytes. It reads two rows and writes two, 32 KiB a token at a width of 4096 in bfloat16: a
decode's rows are nothing, so it is the latency of one kernel (about 2 µs), which hides behind the
weights that the next product already loads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpinference_engine.kernels.grid import has_pdl, power_of_two


@triton.jit
def _norm_kernel(  # noqa: PLR0913
    x,
    delta,
    weight,
    total,
    normed,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    w = tl.load(weight + d, mask=inside, other=0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.load(x + row * x_stride + d, mask=inside, other=0)
    wide = part.to(tl.float32)
    if ADD:
        wide += tl.load(delta + row * WIDTH + d, mask=inside, other=0).to(tl.float32)
        # The stream is kept in the model's dtype, and what is normed is what is kept.
        part = wide.to(part.dtype)
        tl.store(total + row * WIDTH + d, part, mask=inside)
        wide = part.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
    scaled = (wide * inverse).to(part.dtype).to(tl.float32)
    tl.store(normed + row * WIDTH + d, (scaled * w).to(part.dtype), mask=inside)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    normed_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, None, weight_D, normed_TD, eps)
    return normed_TD


def add_rms_norm(
    x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the sum, which is written over `x_TD`; the sum normed)."""
    normed_TD = torch.empty_like(x_TD)
    _launch(x_TD, delta_TD.contiguous(), weight_D, normed_TD, eps)
    return x_TD, normed_TD


def _launch(
    x_TD: torch.Tensor,
    delta_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
    normed_TD: torch.Tensor,
    eps: float,
) -> None:
    num_tokens, width = x_TD.shape
    if not num_tokens:
        return
    block = power_of_two(width)
    pdl = has_pdl(x_TD.device)
    _norm_kernel[(num_tokens,)](
        x_TD,
        x_TD if delta_TD is None else delta_TD,
        weight_D,
        x_TD,
        normed_TD,
        x_TD.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ADD=delta_TD is not None,
        PDL=pdl,
        num_warps=min(16, max(4, block // 512)),
        launch_pdl=pdl,
    )
