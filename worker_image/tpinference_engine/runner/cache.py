"""The paged KV cache of one rank, and the block tables that say which block holds what.

Tensors only: who owns a block is the scheduler's business. Letters: N blocks, B tokens of a block,
G KV heads of this rank, K head width, S slots, C blocks of a slot at most, T tokens, L context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers, keys and values."""
        values = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return values * self.dtype.itemsize


class PagedCache:
    def __init__(
        self,
        shape: CacheShape,
        *,
        num_blocks: int,
        num_slots: int,
        max_blocks_per_slot: int,
        device: torch.device,
    ) -> None:
        self.block_size = shape.block_size
        self.num_kv_heads = shape.num_kv_heads
        self.num_slots = num_slots
        self.device = device
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        # Zeros, because padding is read and multiplied by zero, and garbage may hold a NaN.
        self._keys_NBGK = [
            torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)
        ]
        self._values_NBGK = [
            torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)
        ]
        self.tables_SC = torch.zeros(
            (num_slots, max_blocks_per_slot), dtype=torch.int64, device=device
        )

    def append(self, appends_3E: torch.Tensor) -> None:
        """STATE. What a slot's former owner left beyond its blocks is never in its context."""
        slots_E, places_E, blocks_E = appends_3E
        self.tables_SC[slots_E, places_E] = blocks_E

    def locate(self, slots_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Each token's place among all places of the cache."""
        blocks_T = self.tables_SC[slots_T, positions_T // self.block_size]
        return blocks_T * self.block_size + positions_T % self.block_size

    def blocks(self, slots: torch.Tensor | int, length: int) -> torch.Tensor:
        """The slots' blocks that hold their first `length` positions."""
        return self.tables_SC[slots, : -(-length // self.block_size)]

    def write(
        self, layer: int, places_T: torch.Tensor, k_TGK: torch.Tensor, v_TGK: torch.Tensor
    ) -> None:
        # A NaN or infinity must not outlive its request: what is left in a reused block is masked
        # by adding -inf and multiplied by zero, and they survive both.
        self._keys_NBGK[layer].flatten(0, 1)[places_T] = k_TGK.nan_to_num(0, 0, 0)
        self._values_NBGK[layer].flatten(0, 1)[places_T] = v_TGK.nan_to_num(0, 0, 0)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All its keys and values, [N, B, G, K]."""
        return self._keys_NBGK[layer], self._values_NBGK[layer]

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole blocks, [..., G, L, K] for blocks [..., C]."""
        keys, values = self._keys_NBGK[layer][blocks], self._values_NBGK[layer][blocks]
        return keys.flatten(-4, -3).transpose(-3, -2), values.flatten(-4, -3).transpose(-3, -2)
