"""The Llama family (Llama, Mistral, Qwen2, Qwen3): one rank's part of the forward pass.

It knows no cache and no batch: attention is a function that the caller passes, tokens are flat.
Each layer has two all-reduces and four GEMMs, since Q, K and V, and gate and up, are merged.

Letters: T tokens, D hidden, H this rank's query heads, G its KV heads, K head width, Q merged QKV
width, M this rank's MLP width, V this rank's part of the padded vocabulary, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tpinference_engine.model.config import ModelConfig
from tpinference_engine.model.parallel import TensorParallel
from tpinference_engine.model.rope import Rotation
from tpinference_engine.model.shard import Shard

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q_THK, k_TGK, v_TGK) → o_THK. Puts K and V into the cache first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    qkv_QD: torch.Tensor
    qkv_Q: torch.Tensor | None
    o_DO: torch.Tensor
    o_D: torch.Tensor | None
    q_norm_K: torch.Tensor | None
    k_norm_K: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    gate_up_WD: torch.Tensor
    gate_up_W: torch.Tensor | None
    down_DM: torch.Tensor
    down_D: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    attention_norm_D: torch.Tensor
    attention: AttentionWeights
    mlp_norm_D: torch.Tensor
    mlp: MlpWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    embedding_VD: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: torch.Tensor
    head_VD: torch.Tensor
    """The embedding itself where they are tied."""


class Llama:
    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        weights: LlamaWeights,
        rotation: Rotation,
        parallel: TensorParallel,
    ) -> None:
        self._config = config
        self._shard = shard
        self._weights = weights
        self._rotation = rotation
        self._parallel = parallel

    @property
    def group_size(self) -> int:
        """Query heads of one KV head, the same for all of a rank's."""
        return len(self._shard.heads) // len(self._shard.kv_heads)

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Hidden states before the last norm."""
        rotation = self._rotation.at(positions_T)
        x_TD = self._embed(ids_T)
        for index, layer in enumerate(self._weights.layers):
            normed_TD = rms_norm(x_TD, layer.attention_norm_D, self._config.rms_norm_eps)
            x_TD = x_TD + self._attention(index, layer.attention, normed_TD, rotation, attend)
            normed_TD = rms_norm(x_TD, layer.mlp_norm_D, self._config.rms_norm_eps)
            x_TD = x_TD + self._mlp(layer.mlp, normed_TD)
        return x_TD

    def logits(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Of the whole vocabulary, in float32, the same bits on every rank."""
        normed_RD = rms_norm(x_RD, self._weights.norm_D, self._config.rms_norm_eps)
        part_RV = F.linear(normed_RD, self._weights.head_VD)
        return self._parallel.all_gather(part_RV)[:, : self._config.vocab_size].float()

    def _embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        span = self._shard.vocab
        if self._shard.size == 1:
            return F.embedding(ids_T, self._weights.embedding_VD)
        foreign_T = (ids_T < span.start) | (ids_T >= span.stop)
        local_T = (ids_T - span.start).masked_fill(foreign_T, 0)
        x_TD = F.embedding(local_T, self._weights.embedding_VD)
        return self._parallel.all_reduce(x_TD.masked_fill_(foreign_T.unsqueeze(1), 0))

    def _attention(
        self,
        layer: int,
        weights: AttentionWeights,
        x_TD: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
    ) -> torch.Tensor:
        heads, kv_heads = len(self._shard.heads), len(self._shard.kv_heads)
        qkv_TQ = F.linear(x_TD, weights.qkv_QD, weights.qkv_Q)
        qkv_TNK = qkv_TQ.view(len(x_TD), heads + 2 * kv_heads, self._config.head_dim)
        qk_TNK, v_TGK = qkv_TNK[:, :-kv_heads], qkv_TNK[:, -kv_heads:]
        if weights.q_norm_K is not None and weights.k_norm_K is not None:
            eps = self._config.rms_norm_eps
            q_THK = rms_norm(qk_TNK[:, :heads], weights.q_norm_K, eps)
            k_TGK = rms_norm(qk_TNK[:, heads:], weights.k_norm_K, eps)
            qk_TNK = torch.cat((q_THK, k_TGK), dim=1)
        qk_TNK = rotation.apply(qk_TNK)
        o_THK = attend(layer, qk_TNK[:, :heads], qk_TNK[:, heads:], v_TGK)
        return self._reduce(o_THK.reshape(len(x_TD), -1), weights.o_DO, weights.o_D)

    def _mlp(self, weights: MlpWeights, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TM, up_TM = F.linear(x_TD, weights.gate_up_WD, weights.gate_up_W).chunk(2, dim=-1)
        return self._reduce(F.silu(gate_TM) * up_TM, weights.down_DM, weights.down_D)

    def _reduce(
        self, x_TM: torch.Tensor, weight_DM: torch.Tensor, bias_D: torch.Tensor | None
    ) -> torch.Tensor:
        """A product whose inner dimension is dealt to the ranks; the bias is added once."""
        y_TD = self._parallel.all_reduce(F.linear(x_TM, weight_DM))
        return y_TD if bias_D is None else y_TD + bias_D


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32 inside, as the models were trained."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
