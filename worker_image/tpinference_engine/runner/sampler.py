"""Chooses tokens from logits: greedy, or temperature, then top-k, then top-p, then a draw.

Every row is treated on its own and without randomness of its own (see noise.py), so all ranks
choose alike from the same logits. Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpinference_engine.runner.noise import gumbel


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTensors:
    logits_rows_R: torch.Tensor
    slots_R: torch.Tensor
    seeds_R: torch.Tensor
    indices_R: torch.Tensor
    top_ks_R: torch.Tensor
    temperatures_R: torch.Tensor
    top_ps_R: torch.Tensor


def unpack_sample(columns_7R: torch.Tensor) -> SampleTensors:
    rows, slots, seeds, indices, top_ks = columns_7R[:5]
    temperatures, top_ps = columns_7R[5:].view(torch.float64)
    return SampleTensors(
        logits_rows_R=rows,
        slots_R=slots,
        seeds_R=seeds,
        indices_R=indices,
        top_ks_R=top_ks,
        temperatures_R=temperatures,
        top_ps_R=top_ps,
    )


def sample(
    logits_RV: torch.Tensor, rows: SampleTensors, random_R: torch.Tensor, limited: bool
) -> torch.Tensor:
    """One token a row. `random_R` are the rows that are not greedy, `limited` if one has a top."""
    tokens_R = logits_RV.argmax(dim=-1)
    if len(random_R):
        scores_RV = logits_RV[random_R] / rows.temperatures_R[random_R].float().unsqueeze(1)
        if limited:
            kept_RV = keep(scores_RV, rows.top_ks_R[random_R], rows.top_ps_R[random_R])
            scores_RV = scores_RV.masked_fill(~kept_RV, -torch.inf)
        noise_RV = gumbel(rows.seeds_R[random_R], rows.indices_R[random_R], scores_RV.shape[1])
        tokens_R[random_R] = (scores_RV + noise_RV).argmax(dim=-1)
    return tokens_R


def keep(scores_RV: torch.Tensor, top_ks_R: torch.Tensor, top_ps_R: torch.Tensor) -> torch.Tensor:
    """Which tokens may be drawn. Equal scores rank by vocabulary id; the first is always kept."""
    sorted_RV, order_RV = scores_RV.sort(dim=-1, descending=True, stable=True)
    vocab_size = scores_RV.shape[1]
    ranks_V = torch.arange(vocab_size, device=scores_RV.device)
    limits_R1 = top_ks_R.masked_fill(top_ks_R < 1, vocab_size).unsqueeze(1)
    kept_RV = ranks_V < limits_R1
    chances_RV = sorted_RV.masked_fill(~kept_RV, -torch.inf).softmax(dim=-1).double()
    before_RV = chances_RV.cumsum(dim=-1) - chances_RV
    # Where top_p is 1 rounding must not cut the tail.
    kept_RV &= (before_RV < top_ps_R.unsqueeze(1)) | (top_ps_R >= 1).unsqueeze(1)
    kept_RV[:, 0] = True
    return torch.zeros_like(kept_RV).scatter_(1, order_RV, kept_RV)
