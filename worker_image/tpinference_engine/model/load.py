"""Builds one rank's weights of the Llama family from a checkpoint: names, slices, merged matrices.

Every matrix is made once in its final place and dtype and its parts are read into it, so the peak
is the rank's own weights plus one slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import torch

from tpinference_engine.model.config import ModelConfig
from tpinference_engine.model.llama import (
    AttentionWeights,
    LayerWeights,
    LlamaWeights,
    MlpWeights,
)
from tpinference_engine.model.shard import Shard, Span
from tpinference_engine.model.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one tensor of the checkpoint that become rows of a merged matrix."""

    name: str
    rows: Span
    num_rows: int
    """Of the whole tensor."""


def load_llama(
    directory: Path, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device
) -> LlamaWeights:
    with Checkpoint(directory) as checkpoint:
        return _Loader(checkpoint, config, shard, dtype, device).model()


def num_bytes(weights: object) -> int:
    """Of all distinct tensors in a tree of dataclasses and tuples."""
    found = {tensor.data_ptr(): tensor.nbytes for tensor in tensors(weights)}
    return sum(found.values())


def tensors(tree: object) -> Iterator[torch.Tensor]:
    """All of a tree of dataclasses and tuples, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for item in tree:
            yield from tensors(item)
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from tensors(getattr(tree, field.name))


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._shard = shard
        self._dtype = dtype
        self._device = device

    def model(self) -> LlamaWeights:
        embedding_VD = self._vocab_rows("model.embed_tokens.weight")
        tied = self._config.tie_word_embeddings
        return LlamaWeights(
            embedding_VD=embedding_VD,
            layers=tuple(self._layer(index) for index in range(self._config.num_layers)),
            norm_D=self._whole("model.norm.weight", self._config.hidden_size),
            head_VD=embedding_VD if tied else self._vocab_rows("lm_head.weight"),
        )

    def _layer(self, index: int) -> LayerWeights:
        prefix, hidden = f"model.layers.{index}", self._config.hidden_size
        return LayerWeights(
            attention_norm_D=self._whole(f"{prefix}.input_layernorm.weight", hidden),
            attention=self._attention(f"{prefix}.self_attn"),
            mlp_norm_D=self._whole(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=self._mlp(f"{prefix}.mlp"),
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        config, width = self._config, self._config.head_dim
        heads, kv_heads = self._shard.heads.times(width), self._shard.kv_heads.times(width)
        qkv = [
            _Part(f"{prefix}.q_proj", heads, config.num_heads * width),
            _Part(f"{prefix}.k_proj", kv_heads, config.num_kv_heads * width),
            _Part(f"{prefix}.v_proj", kv_heads, config.num_kv_heads * width),
        ]
        norms = config.qk_norm
        return AttentionWeights(
            qkv_QD=self._rows(qkv, config.hidden_size),
            qkv_Q=self._biases(qkv) if config.qkv_bias else None,
            o_DO=self._columns(f"{prefix}.o_proj", heads, config.num_heads * width),
            o_D=self._whole(f"{prefix}.o_proj.bias", config.hidden_size) if config.o_bias else None,
            q_norm_K=self._whole(f"{prefix}.q_norm.weight", width) if norms else None,
            k_norm_K=self._whole(f"{prefix}.k_norm.weight", width) if norms else None,
        )

    def _mlp(self, prefix: str) -> MlpWeights:
        config, mine = self._config, self._shard.mlp
        gate_up = [
            _Part(f"{prefix}.gate_proj", mine, config.intermediate_size),
            _Part(f"{prefix}.up_proj", mine, config.intermediate_size),
        ]
        bias, hidden = config.mlp_bias, config.hidden_size
        return MlpWeights(
            gate_up_WD=self._rows(gate_up, hidden),
            gate_up_W=self._biases(gate_up) if bias else None,
            down_DM=self._columns(f"{prefix}.down_proj", mine, config.intermediate_size),
            down_D=self._whole(f"{prefix}.down_proj.bias", hidden) if bias else None,
        )

    def _vocab_rows(self, name: str) -> torch.Tensor:
        """Rows beyond the vocabulary are zero; their logits are cut off after the gather."""
        config, span = self._config, self._shard.vocab
        made_VD = self._empty(len(span), config.hidden_size).zero_()
        mine = span.clip(config.vocab_size)
        if len(mine):
            shape = (config.vocab_size, config.hidden_size)
            made_VD[: len(mine)].copy_(self._checkpoint.read(name, shape, mine))
        return made_VD

    def _rows(self, parts: list[_Part], width: int) -> torch.Tensor:
        made = self._empty(sum(len(part.rows) for part in parts), width)
        at = 0
        for part in parts:
            shape = (part.num_rows, width)
            found = self._checkpoint.read(f"{part.name}.weight", shape, part.rows)
            made[at : at + len(part.rows)].copy_(found)
            at += len(part.rows)
        return made

    def _biases(self, parts: list[_Part]) -> torch.Tensor:
        found = [
            self._checkpoint.read(f"{part.name}.bias", (part.num_rows,), part.rows)
            for part in parts
        ]
        return torch.cat(found).to(self._device, self._dtype)

    def _columns(self, name: str, columns: Span, num_columns: int) -> torch.Tensor:
        rows = self._config.hidden_size
        made = self._empty(rows, len(columns))
        shape = (rows, num_columns)
        made.copy_(self._checkpoint.read(f"{name}.weight", shape, Span(0, rows), columns))
        return made

    def _whole(self, name: str, width: int) -> torch.Tensor:
        # A copy even where nothing changes: what was read is still the mapped file.
        return self._checkpoint.read(name, (width,)).to(self._device, self._dtype, copy=True)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
