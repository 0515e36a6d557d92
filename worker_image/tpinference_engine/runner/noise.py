"""Gumbel noise as a pure function of (seed, output index, vocabulary id).

No generator and no state: a token's noise is the same whatever else is in the batch, after a
preemption, in a replay and on every rank. The hash is splitmix64, started for each (seed, index).
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_MANTISSA_BITS = 52


def gumbel(seeds_R: torch.Tensor, indices_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, V] in float32. Adding it to logits and taking the greatest draws from their softmax."""
    uniform_RV = _uniform(seeds_R, indices_R, vocab_size)
    return -torch.log(-torch.log(uniform_RV)).float()


def _uniform(seeds_R: torch.Tensor, indices_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """In float64, strictly between 0 and 1."""
    starts_R = _mix(_mix(seeds_R) + indices_R * _GOLDEN)
    steps_V = torch.arange(1, vocab_size + 1, device=seeds_R.device) * _GOLDEN
    bits_RV = _shift(_mix(starts_R.unsqueeze(1) + steps_V), 64 - _MANTISSA_BITS)
    return (bits_RV.double() + 0.5) * 2.0**-_MANTISSA_BITS


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Arithmetic of int64 wraps, as that of the unsigned original."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right with zeros; torch's own repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
