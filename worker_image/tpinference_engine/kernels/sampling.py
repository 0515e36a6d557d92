# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""A token a row: the greatest logit, or the greatest of logit over temperature plus Gumbel noise.

Rows with a top-k or top-p are not for these kernels: they need the vocabulary in order. Noise is
that of runner/noise.py, bit for bit but for the last place of a logarithm. Equal scores go to the
smaller token; NaN counts as the greatest, as in torch.

Roof: bytes, the logits once: 0.5 MB a row of 128256 in float32, 7.2 µs for 64 rows at 4.5 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpinference_engine.kernels.grid import has_pdl, power_of_two

_BLOCK = 1024
_PARTS = 32
_NOBODY = 2**31 - 1


@triton.jit
def _mix(x):
    """splitmix64's output function."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(start, tokens):
    bits = _mix(start + (tokens + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 12
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _best(scores, tokens, nobody):
    most = tl.max(scores, 0)
    return most, tl.min(tl.where(scores == most, tokens, nobody), 0)


@triton.jit(
    do_not_specialize=["num_rows", "vocab_size"], do_not_specialize_on_alignment=["columns"]
)
def _part_kernel(  # noqa: PLR0913
    logits, columns, part_scores, part_tokens, num_rows, logits_stride, vocab_size,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, NOBODY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    logits_row = tl.load(columns + row)
    seed = tl.load(columns + 2 * num_rows + row).to(tl.uint64, bitcast=True)
    index = tl.load(columns + 3 * num_rows + row).to(tl.uint64, bitcast=True)
    bits = tl.load(columns + 5 * num_rows + row)
    temperature = bits.to(tl.float64, bitcast=True).to(tl.float32)
    start = _mix(_mix(seed) + index * 0x9E3779B97F4A7C15)
    best_score = float("-inf")
    best_token = NOBODY
    for first in range(part * BLOCK, vocab_size, PARTS * BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        exists = tokens < vocab_size
        at = logits + logits_row * logits_stride + tokens
        scores = tl.load(at, mask=exists, other=float("-inf")).to(tl.float32)
        if temperature > 0:
            scores = tl.div_rn(scores, tl.full(scores.shape, 1.0, tl.float32) * temperature)
            scores += _gumbel(start, tokens)
        scores = tl.where(scores != scores, float("inf"), scores)
        score, token = _best(scores, tl.where(exists, tokens, NOBODY), NOBODY)
        if (score > best_score) | (best_token == NOBODY):
            best_score, best_token = score, token
    tl.store(part_scores + row * PARTS + part, best_score)
    tl.store(part_tokens + row * PARTS + part, best_token)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["columns"])
def _join_kernel(  # noqa: PLR0913
    part_scores, part_tokens, columns, chosen, last_tokens, num_rows,
    PARTS: tl.constexpr, NOBODY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    parts = row * PARTS + tl.arange(0, PARTS)
    _, token = _best(tl.load(part_scores + parts), tl.load(part_tokens + parts), NOBODY)
    token = token.to(tl.int64)
    tl.store(chosen + row, token)
    tl.store(last_tokens + tl.load(columns + num_rows + row), token)


def choose_tokens(
    logits_RV: torch.Tensor, columns_7R: torch.Tensor, last_token_S: torch.Tensor
) -> torch.Tensor:
    """One token for each column (see SampleArrays), also kept as its slot's last."""
    num_rows, vocab_size = columns_7R.shape[1], logits_RV.shape[1]
    device = logits_RV.device
    # No more parts than there are blocks: a part without one has no token.
    parts = min(_PARTS, power_of_two(triton.cdiv(vocab_size, _BLOCK) + 1) // 2)
    part_scores = torch.empty((num_rows, parts), dtype=torch.float32, device=device)
    part_tokens = torch.empty((num_rows, parts), dtype=torch.int32, device=device)
    chosen_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    pdl = has_pdl(device)
    _part_kernel[(num_rows, parts)](
        logits_RV, columns_7R, part_scores, part_tokens, num_rows, logits_RV.stride(0), vocab_size,
        BLOCK=_BLOCK, PARTS=parts, NOBODY=_NOBODY, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    _join_kernel[(num_rows,)](
        part_scores, part_tokens, columns_7R, chosen_R, last_token_S, num_rows,
        PARTS=parts, NOBODY=_NOBODY, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return chosen_R
