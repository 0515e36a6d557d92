"""What a layer is made of besides attention: an interface, and its meaning in plain torch.

The model file knows these names only. On CPU, and as the reference of every kernel, it is this
plain form; `kernels/ops.py` has another one for CUDA.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Ops(Protocol):
    """Letters as in llama.py; N outputs of a product."""

    def linear(
        self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def gated(
        self, x_TD: torch.Tensor, weight_WD: torch.Tensor, bias_W: torch.Tensor | None
    ) -> torch.Tensor:
        """silu(gate) · up, whose merged matrix holds all gates, then all ups."""

    def norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, and the sum normed. `x_TD` is the caller's no longer."""

    def head(self, x_RD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's part of the vocabulary."""


class TorchOps:
    def linear(
        self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(x_TD, weight_ND, bias_N)

    def gated(
        self, x_TD: torch.Tensor, weight_WD: torch.Tensor, bias_W: torch.Tensor | None
    ) -> torch.Tensor:
        gate_TM, up_TM = F.linear(x_TD, weight_WD, bias_W).chunk(2, dim=-1)
        return F.silu(gate_TM) * up_TM

    def norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x_TD, weight_D, eps)

    def add_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total_TD = x_TD + delta_TD
        return total_TD, rms_norm(total_TD, weight_D, eps)

    def head(self, x_RD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_RD, weight_VD)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32 inside, as the models were trained."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
