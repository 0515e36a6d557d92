"""Attention of one step's rows over the paged cache, by plain gathers, on any device.

Single tokens are padded to the longest context among them and go as one batch; chunks go one by
one. What a row sees is its own blocks and a mask, so it does not depend on its neighbours.

Letters: T tokens (of the step, or of one chunk), H query heads, G KV heads, Q query heads of a KV
head, K head width, R rows of one token, C blocks, L positions in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from tpinference_engine.model.llama import Heads
from tpinference_engine.model.rope import Rotation
from tpinference_engine.runner.batch import Chunk, ForwardArrays
from tpinference_engine.runner.cache import PagedCache

# Contexts are gathered for so many positions at once, padding included: it bounds the copy.
MAX_GATHERED_POSITIONS = 1 << 17


@dataclass(frozen=True, slots=True)
class _Reads:
    """Some of the step's flat tokens and what they see."""

    first: int
    stop: int
    blocks: torch.Tensor
    mask: torch.Tensor


class PagedAttention:
    """Made once a step, called once a layer."""

    def __init__(
        self,
        cache: PagedCache,
        rotation: Rotation,
        arrays: ForwardArrays,
        slots_T: torch.Tensor,
        positions_T: torch.Tensor,
    ) -> None:
        self._cache = cache
        self._rotation = rotation.at(positions_T)
        self._places_T = cache.locate(slots_T, positions_T)
        self._singles = self._prepare_singles(arrays, slots_T, positions_T)
        self._chunks = [self._prepare_chunk(chunk, positions_T) for chunk in arrays.chunks]

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        q_THK, k_TGK, v_TGK = heads.rotated(self._rotation)
        self._cache.write(layer, self._places_T, k_TGK, v_TGK)
        q_TGQK = q_THK.view(len(q_THK), heads.num_kv_heads, -1, q_THK.shape[-1])
        parts = [self._single(layer, r, q_TGQK[r.first : r.stop]) for r in self._singles]
        parts += [self._chunk(layer, r, q_TGQK[r.first : r.stop]) for r in self._chunks]
        o_TGQK = parts[0] if len(parts) == 1 else torch.cat(parts)
        return o_TGQK.flatten(1, 2)

    def _prepare_singles(
        self, arrays: ForwardArrays, slots_T: torch.Tensor, positions_T: torch.Tensor
    ) -> list[_Reads]:
        longest, reads = arrays.longest_single, []
        num_rows = max(1, MAX_GATHERED_POSITIONS // max(1, longest))
        for first in range(0, arrays.num_single, num_rows):
            stop = min(first + num_rows, arrays.num_single)
            blocks_RC = self._cache.blocks(slots_T[first:stop], longest)
            mask_RL = self._visible(positions_T[first:stop], blocks_RC)
            reads.append(_Reads(first, stop, blocks_RC, mask_RL[:, None, None, :]))
        return reads

    def _prepare_chunk(self, chunk: Chunk, positions_T: torch.Tensor) -> _Reads:
        stop = chunk.first + chunk.num_tokens
        blocks_C = self._cache.blocks(chunk.slot, chunk.start + chunk.num_tokens)
        mask_TL = self._visible(positions_T[chunk.first : stop], blocks_C)
        return _Reads(chunk.first, stop, blocks_C, mask_TL)

    def _visible(self, positions: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Which positions of whole blocks each token sees: its own and those before it."""
        length = blocks.shape[-1] * self._cache.block_size
        return torch.arange(length, device=positions.device) <= positions.unsqueeze(1)

    def _single(self, layer: int, reads: _Reads, q_RGQK: torch.Tensor) -> torch.Tensor:
        """The query heads of a KV group take the query axis: nothing is repeated."""
        keys_RGLK, values_RGLK = self._cache.read(layer, reads.blocks)
        return scaled_dot_product_attention(q_RGQK, keys_RGLK, values_RGLK, attn_mask=reads.mask)

    def _chunk(self, layer: int, reads: _Reads, q_TGQK: torch.Tensor) -> torch.Tensor:
        """KV groups take the batch axis and share their keys by a stride of 0."""
        keys_GLK, values_GLK = self._cache.read(layer, reads.blocks)
        shared = (-1, q_TGQK.shape[2], -1, -1)
        o_GQTK = scaled_dot_product_attention(
            q_TGQK.permute(1, 2, 0, 3),
            keys_GLK.unsqueeze(1).expand(shared),
            values_GLK.unsqueeze(1).expand(shared),
            attn_mask=reads.mask,
        )
        return o_GQTK.permute(2, 0, 1, 3)
