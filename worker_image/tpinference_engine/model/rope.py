"""Rotary position embeddings: the angles of each position, computed once per engine.

Letters: P positions, F frequencies (half of the head's width), T tokens, H heads, K head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tpinference_engine.model.config import RopeConfig


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and signed sine of each position, ready to be multiplied with whole heads."""

    cos_PK: torch.Tensor
    sin_PK: torch.Tensor

    def at(self, positions_T: torch.Tensor) -> Rotation:
        return Rotation(self.cos_PK[positions_T], self.sin_PK[positions_T])

    def apply(self, x_THK: torch.Tensor) -> torch.Tensor:
        """`self` holds the tokens' own positions (see `at`)."""
        half = x_THK.shape[-1] // 2
        swapped_THK = torch.cat((x_THK[..., half:], x_THK[..., :half]), dim=-1)
        return x_THK * self.cos_PK.unsqueeze(1) + swapped_THK * self.sin_PK.unsqueeze(1)


def make_rotation(
    rope: RopeConfig, *, head_dim: int, max_len: int, dtype: torch.dtype, device: torch.device
) -> Rotation:
    angles_PF = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies(rope, head_dim))
    cos_PF, sin_PF = angles_PF.cos(), angles_PF.sin()
    # The first half of a head is rotated against the second, so its sine is negative.
    return Rotation(
        torch.cat((cos_PF, cos_PF), dim=-1).to(device, dtype),
        torch.cat((-sin_PF, sin_PF), dim=-1).to(device, dtype),
    )


def frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse_F = 1.0 / rope.theta**exponents_F
    if rope.kind == "linear":
        return inverse_F / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse_F)
    return inverse_F


def _llama3(rope: RopeConfig, inverse_F: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between are blended."""
    wavelength_F = 2 * math.pi / inverse_F
    turns_F = rope.original_max_position / wavelength_F
    span = rope.high_freq_factor - rope.low_freq_factor
    keep_F = (turns_F - rope.low_freq_factor) / span
    blended_F = (1 - keep_F) * inverse_F / rope.factor + keep_F * inverse_F
    stretched_F = torch.where(turns_F < rope.low_freq_factor, inverse_F / rope.factor, blended_F)
    return torch.where(turns_F > rope.high_freq_factor, inverse_F, stretched_F)
