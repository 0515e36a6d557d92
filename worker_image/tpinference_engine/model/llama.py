"""The Llama family (Llama, Mistral, Qwen2, Qwen3): one rank's part of the forward pass.

It knows no cache, no batch and no position: attention is a function that the caller passes, tokens
are flat. Each layer has two all-reduces and four GEMMs, since Q, K and V, and gate and up, are
merged. How an operation is carried out is the business of `Ops`.

Letters: T tokens, D hidden, H this rank's query heads, G its KV heads, K head width, Q merged QKV
width, M this rank's MLP width, V this rank's part of the padded vocabulary, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tpinference_engine.model.config import ModelConfig
from tpinference_engine.model.ops import Ops, rms_norm
from tpinference_engine.model.parallel import TensorParallel
from tpinference_engine.model.rope import Rotation
from tpinference_engine.model.shard import Shard


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's queries, keys and values as their product left them: neither normed nor rotated."""

    qkv_TNK: torch.Tensor
    num_heads: int
    num_kv_heads: int
    q_norm_K: torch.Tensor | None
    k_norm_K: torch.Tensor | None
    eps: float

    def rotated(self, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_THK, k_TGK, v_TGK, ready for the scores. `rotation` is that of the tokens."""
        qk_TNK, v_TGK = self.qkv_TNK[:, : -self.num_kv_heads], self.qkv_TNK[:, -self.num_kv_heads :]
        if self.q_norm_K is not None and self.k_norm_K is not None:
            q_THK = rms_norm(qk_TNK[:, : self.num_heads], self.q_norm_K, self.eps)
            k_TGK = rms_norm(qk_TNK[:, self.num_heads :], self.k_norm_K, self.eps)
            qk_TNK = torch.cat((q_THK, k_TGK), dim=1)
        qk_TNK = rotation.apply(qk_TNK)
        return qk_TNK[:, : self.num_heads], qk_TNK[:, self.num_heads :], v_TGK


Attend = Callable[[int, Heads], torch.Tensor]
"""(layer, heads) → o_THK. Norms and rotates, and puts keys and values into the cache first."""


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
        parallel: TensorParallel,
        ops: Ops,
    ) -> None:
        self._config = config
        self._shard = shard
        self._weights = weights
        self._parallel = parallel
        self._ops = ops
        # A layer ends with the norm of what follows it.
        self._norms = [layer.attention_norm_D for layer in weights.layers] + [weights.norm_D]

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def forward(self, ids_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states after the last norm."""
        eps = self._config.rms_norm_eps
        x_TD = self._embed(ids_T)
        normed_TD = self._ops.norm(x_TD, self._norms[0], eps)
        for index, layer in enumerate(self._weights.layers):
            delta_TD = self._attention(index, layer.attention, normed_TD, attend)
            x_TD, normed_TD = self._ops.add_norm(x_TD, delta_TD, layer.mlp_norm_D, eps)
            delta_TD = self._mlp(layer.mlp, normed_TD)
            x_TD, normed_TD = self._ops.add_norm(x_TD, delta_TD, self._norms[index + 1], eps)
        return normed_TD

    def logits(self, normed_RD: torch.Tensor) -> torch.Tensor:
        """Of the whole vocabulary, in float32, the same bits on every rank."""
        part_RV = self._ops.head(normed_RD, self._weights.head_VD)
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
        self, layer: int, weights: AttentionWeights, x_TD: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        heads, kv_heads = len(self._shard.heads), len(self._shard.kv_heads)
        qkv_TQ = self._ops.linear(x_TD, weights.qkv_QD, weights.qkv_Q)
        merged = Heads(
            qkv_TQ.view(len(x_TD), heads + 2 * kv_heads, self._config.head_dim),
            heads,
            kv_heads,
            weights.q_norm_K,
            weights.k_norm_K,
            self._config.rms_norm_eps,
        )
        o_THK = attend(layer, merged)
        return self._reduce(o_THK.reshape(len(x_TD), -1), weights.o_DO, weights.o_D)

    def _mlp(self, weights: MlpWeights, x_TD: torch.Tensor) -> torch.Tensor:
        y_TM = self._ops.gated(x_TD, weights.gate_up_WD, weights.gate_up_W)
        return self._reduce(y_TM, weights.down_DM, weights.down_D)

    def _reduce(
        self, x_TM: torch.Tensor, weight_DM: torch.Tensor, bias_D: torch.Tensor | None
    ) -> torch.Tensor:
        """A product whose inner dimension is dealt to the ranks; the bias is added once."""
        y_TD = self._parallel.all_reduce(self._ops.linear(x_TM, weight_DM))
        return y_TD if bias_D is None else y_TD + bias_D
