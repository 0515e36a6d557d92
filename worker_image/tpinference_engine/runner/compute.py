"""How a step's mathematics is carried out on one kind of device: an interface, and plain torch.

The runner knows what a step does, this how. On CPU it is the plain form of this module; on CUDA
that of `kernel_compute.py`, which is imported only there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tpinference_engine.model.llama import Attend
from tpinference_engine.model.ops import Ops, TorchOps
from tpinference_engine.model.rope import Rotation
from tpinference_engine.runner.attention import PagedAttention
from tpinference_engine.runner.batch import ForwardArrays
from tpinference_engine.runner.cache import PagedCache
from tpinference_engine.runner.sampler import sample, unpack_sample


@dataclass(frozen=True, slots=True)
class SampleTensors:
    columns_7R: torch.Tensor
    random_R: torch.Tensor
    limited: bool


@dataclass(frozen=True, slots=True)
class ForwardTensors:
    tokens_3T: torch.Tensor
    logits_columns_R: torch.Tensor
    chunks_4C: torch.Tensor


# A CPU's first pass over a long prompt takes seconds and teaches it nothing.
CPU_WARM_UP_TOKENS = 16


class Compute(Protocol):
    @property
    def ops(self) -> Ops: ...

    def warm_up_lengths(self, longest: int) -> tuple[int, ...]:
        """Of prompts after which nothing is done for the first time any more."""

    def attention(
        self, cache: PagedCache, rotation: Rotation, arrays: ForwardArrays, tensors: ForwardTensors
    ) -> Attend:
        """Of all tokens of one step, for every layer."""

    def sample(
        self, logits_RV: torch.Tensor, wanted: SampleTensors, last_token_S: torch.Tensor
    ) -> torch.Tensor:
        """A token for each column, which `last_token_S` keeps for its slot."""


class PlainCompute:
    def __init__(self) -> None:
        self.ops = TorchOps()

    def warm_up_lengths(self, longest: int) -> tuple[int, ...]:
        return (CPU_WARM_UP_TOKENS,)

    def attention(
        self, cache: PagedCache, rotation: Rotation, arrays: ForwardArrays, tensors: ForwardTensors
    ) -> Attend:
        _, slots_T, positions_T = tensors.tokens_3T
        return PagedAttention(cache, rotation, arrays, slots_T, positions_T)

    def sample(
        self, logits_RV: torch.Tensor, wanted: SampleTensors, last_token_S: torch.Tensor
    ) -> torch.Tensor:
        rows = unpack_sample(wanted.columns_7R)
        tokens_R = sample(logits_RV[rows.logits_rows_R], rows, wanted.random_R, wanted.limited)
        last_token_S[rows.slots_R] = tokens_R
        return tokens_R


def make_compute(device: torch.device) -> Compute:
    if device.type != "cuda":
        return PlainCompute()
    # Triton is there with torch for CUDA only.
    from tpinference_engine.runner.kernel_compute import KernelCompute

    return KernelCompute()
