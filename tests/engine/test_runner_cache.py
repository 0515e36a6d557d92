"""The paged cache keeps its owners apart."""

from __future__ import annotations

import pytest
import torch

from tpinference_engine.model.llama import Heads
from tpinference_engine.model.rope import Rotation
from tpinference_engine.runner.attention import PagedAttention
from tpinference_engine.runner.batch import forward_arrays
from tpinference_engine.runner.cache import CacheShape, PagedCache
from tpinference_engine.step import ForwardRow

SHAPE = CacheShape(num_layers=1, block_size=4, num_kv_heads=1, head_dim=8, dtype=torch.float32)


@pytest.fixture
def cache() -> PagedCache:
    device = torch.device("cpu")
    return PagedCache(SHAPE, num_blocks=4, num_slots=2, max_blocks_per_slot=2, device=device)


def attend(cache: PagedCache, row: ForwardRow, k_TGK: torch.Tensor) -> torch.Tensor:
    arrays = forward_arrays([row])
    _, slots_T, positions_T = torch.from_numpy(arrays.tokens)
    still = Rotation(torch.ones(8, 8), torch.zeros(8, 8))
    attention = PagedAttention(cache, still, arrays, slots_T, positions_T)
    qkv_TNK = torch.cat((torch.ones_like(k_TGK), k_TGK, k_TGK), dim=1)
    return attention(0, Heads(qkv_TNK, 1, 1, None, None, 0.0))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_tokens", [1, 2], ids=["single", "chunk"])
def test_nan_does_not_outlive_its_request(
    cache: PagedCache, poison: float, num_tokens: int
) -> None:
    cache.append(torch.tensor([[0], [0], [3]]))
    attend(cache, ForwardRow(0, 1, 0, 4, (1, 2, 3, 4), False), torch.full((4, 1, 8), poison))
    cache.append(torch.tensor([[1], [0], [3]]))
    row = ForwardRow(1, 2, 0, num_tokens, (1,) * num_tokens, True)
    found = attend(cache, row, torch.full((num_tokens, 1, 8), 0.5))
    assert torch.equal(found, torch.full((num_tokens, 1, 8), 0.5))


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    assert SHAPE.block_bytes == 2 * 4 * 8 * 4
