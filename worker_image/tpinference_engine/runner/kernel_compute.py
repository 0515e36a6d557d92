"""A step's mathematics on CUDA: its own kernels, none of which makes the host wait.

Rows of one token go to one kernel, which norms, rotates and stores as well; chunks take three.
Sampling with a top-k or top-p is plain torch, since it needs the vocabulary in order.
"""

from __future__ import annotations

import torch

from tpinference_engine.kernels.chunk_attention import LENGTHS, chunk_attention, store_heads
from tpinference_engine.kernels.decode_attention import (
    Arrivals,
    CacheView,
    HeadLayout,
    decode_attention,
    num_parts,
)
from tpinference_engine.kernels.ops import KernelOps
from tpinference_engine.kernels.sampling import choose_tokens
from tpinference_engine.model.llama import Attend, Heads
from tpinference_engine.model.rope import Rotation
from tpinference_engine.runner.batch import ForwardArrays
from tpinference_engine.runner.cache import PagedCache
from tpinference_engine.runner.compute import ForwardTensors, PlainCompute, SampleTensors


class KernelCompute:
    def __init__(self) -> None:
        self.ops = KernelOps()
        self._plain = PlainCompute()
        self._arrivals: Arrivals | None = None

    def warm_up_lengths(self, longest: int) -> tuple[int, ...]:
        return (longest, *LENGTHS)

    def attention(
        self, cache: PagedCache, rotation: Rotation, arrays: ForwardArrays, tensors: ForwardTensors
    ) -> Attend:
        if self._arrivals is None:
            # Once for all graphs, which keep its address.
            self._arrivals = Arrivals(cache.num_slots, cache.num_kv_heads, cache.device)
        return _KernelAttention(cache, rotation, arrays, tensors, self._arrivals)

    def sample(
        self, logits_RV: torch.Tensor, wanted: SampleTensors, last_token_S: torch.Tensor
    ) -> torch.Tensor:
        if wanted.limited:
            return self._plain.sample(logits_RV, wanted, last_token_S)
        return choose_tokens(logits_RV, wanted.columns_7R, last_token_S)


class _KernelAttention:
    """Made once a step (or once a graph), called once a layer."""

    def __init__(
        self,
        cache: PagedCache,
        rotation: Rotation,
        arrays: ForwardArrays,
        tensors: ForwardTensors,
        arrivals: Arrivals,
    ) -> None:
        self._cache = cache
        self._rotation = rotation
        self._arrivals = arrivals
        self._num_single = arrays.num_single
        self._longest = max((chunk.num_tokens for chunk in arrays.chunks), default=0)
        _, self._slots_T, self._positions_T = tensors.tokens_3T
        self._chunks_4C = tensors.chunks_4C
        self._parts = num_parts(self._num_single, cache.num_kv_heads, cache.device)

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        layout = HeadLayout(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            q_norm_K=heads.q_norm_K,
            k_norm_K=heads.k_norm_K,
            eps=heads.eps,
            cos_PK=self._rotation.cos_PK,
            sin_PK=self._rotation.sin_PK,
        )
        view = _view(self._cache, layer)
        count = self._num_single
        parts: list[torch.Tensor] = []
        if count:
            where = self._slots_T[:count], self._positions_T[:count]
            single_TNK = heads.qkv_TNK[:count]
            parts.append(
                decode_attention(single_TNK, layout, view, where, self._arrivals, self._parts)
            )
        if self._longest:
            where = self._slots_T[count:], self._positions_T[count:]
            q_THK = store_heads(heads.qkv_TNK[count:], layout, view, where)
            parts.append(chunk_attention(q_THK, view, self._chunks_4C, self._longest))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _view(cache: PagedCache, layer: int) -> CacheView:
    keys_NBGK, values_NBGK = cache.layer(layer)
    return CacheView(keys_NBGK=keys_NBGK, values_NBGK=values_NBGK, tables_SC=cache.tables_SC)
