"""The operations of a layer on CUDA: Triton kernels where they win, cuBLAS where it does.

A stand-in for `TorchOps` of the model, by shape alone: nothing here knows what the tensors are for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tpinference_engine.kernels.gated import silu_gated
from tpinference_engine.kernels.linear import Tiling, batch_linear, fits, row_linear
from tpinference_engine.kernels.norm import add_rms_norm, rms_norm

# Measured on one H200, in a CUDA graph: docs/performance.md.
ROW = Tiling(block_n=4, block_k=2048, warps=8)
GATED_ROW = Tiling(block_n=1, block_k=4096)
LONG_ROW = Tiling(block_n=2, block_k=2048, early=True)
BATCH = Tiling(block_n=16, block_k=128, stages=3)
GATED_BATCH = Tiling(block_n=16, block_k=128, stages=3)
LONG_BATCH = Tiling(block_n=16, block_k=128, stages=3)
SQUARE_BATCH = Tiling(block_n=32, block_k=128, stages=3)
LONG_WIDTH = 8192
"""Rows of a matrix from here on are long."""


class KernelOps:
    def linear(
        self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not fits(x_TD, weight_ND):
            return F.linear(x_TD, weight_ND, bias_N)
        y_TN = x_TD.new_empty((len(x_TD), len(weight_ND)))
        return self._few_rows(x_TD, weight_ND, bias_N, y_TN)

    def gated(
        self, x_TD: torch.Tensor, weight_WD: torch.Tensor, bias_W: torch.Tensor | None
    ) -> torch.Tensor:
        if not fits(x_TD, weight_WD):
            return silu_gated(F.linear(x_TD, weight_WD, bias_W))
        y_TM = x_TD.new_empty((len(x_TD), len(weight_WD) // 2))
        if len(x_TD) == 1:
            return row_linear(x_TD, weight_WD, bias_W, y_TM, GATED_ROW, gated=True)
        return batch_linear(x_TD, weight_WD, bias_W, y_TM, GATED_BATCH, gated=True)

    def norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x_TD, weight_D, eps)

    def add_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x_TD, delta_TD, weight_D, eps)

    def head(self, x_RD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """In float32 from the accumulators: rounded to bfloat16, one in 25 of the greatest ties."""
        if x_RD.dtype == torch.float32:
            return F.linear(x_RD, weight_VD)
        if not fits(x_RD, weight_VD):
            return torch.mm(x_RD, weight_VD.t(), out_dtype=torch.float32)
        logits_RV = x_RD.new_empty((len(x_RD), len(weight_VD)), dtype=torch.float32)
        return self._few_rows(x_RD, weight_VD, None, logits_RV)

    def _few_rows(
        self,
        x_TD: torch.Tensor,
        weight_ND: torch.Tensor,
        bias_N: torch.Tensor | None,
        y_TN: torch.Tensor,
    ) -> torch.Tensor:
        outputs, width = weight_ND.shape
        if len(x_TD) == 1:
            tiling = LONG_ROW if width >= LONG_WIDTH else ROW
            return row_linear(x_TD, weight_ND, bias_N, y_TN, tiling)
        tiling = LONG_BATCH if width >= LONG_WIDTH else SQUARE_BATCH if outputs <= width else BATCH
        return batch_linear(x_TD.contiguous(), weight_ND, bias_N, y_TN, tiling)
