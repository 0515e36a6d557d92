"""The attention kernels against the plain paged attention, over shapes, contexts and dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tpinference_engine.model.config import RopeConfig
from tpinference_engine.model.llama import Heads
from tpinference_engine.model.rope import make_rotation
from tpinference_engine.runner.batch import forward_arrays
from tpinference_engine.runner.cache import CacheShape, PagedCache
from tpinference_engine.runner.compute import Compute, ForwardTensors, PlainCompute
from tpinference_engine.step import ForwardRow

pytestmark = pytest.mark.gpu

LONGEST = 1200
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    width: int
    block_size: int
    normed: bool = False


SHAPES = {
    "llama-8b": Shape(32, 8, 128, 16),
    "smollm2": Shape(9, 3, 64, 16),
    "odd-normed": Shape(6, 2, 24, 4, normed=True),
    "tiny": Shape(8, 2, 8, 4),
    "one-kv-wide-group": Shape(20, 1, 64, 32),
}
# (what is in the cache, new tokens) of each row.
STEPS = {
    "first token": [(0, 1)],
    "decodes": [(5, 1), (0, 1), (63, 1), (64, 1), (65, 1), (500, 1)],
    "long decode": [(1100, 1), (3, 1)],
    "chunk": [(0, 130)],
    "chunk after others": [(77, 65)],
    "mixed": [(3, 1), (0, 40), (40, 1), (127, 129), (16, 2)],
}


class Case:
    """One cache, filled with something where nothing is, and a step over it.

    Made in float32 on the CPU, of numbers that `dtype` has.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, rows: list[tuple[int, int]]) -> None:
        self.generator = torch.Generator().manual_seed(sum(map(sum, rows)))
        self.shape, self.dtype = shape, dtype
        self.rows = [
            ForwardRow(slot, 0, start, count, (1,) * count, True)
            for slot, (start, count) in enumerate(rows)
        ]
        merged = shape.heads + 2 * shape.kv_heads
        q_norm, k_norm = (self.random(shape.width) if shape.normed else None for _ in range(2))
        count = sum(row.num_tokens for row in self.rows)
        self.heads = Heads(
            self.random(count, merged, shape.width),
            shape.heads,
            shape.kv_heads,
            q_norm,
            k_norm,
            1e-5,
        )
        self.cached = [self.random(2, start, shape.kv_heads, shape.width) for start, _ in rows]

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(self.dtype).float()

    def cache(self, filling: float, dtype: torch.dtype, device: torch.device) -> PagedCache:
        size = self.shape.block_size
        each = -(-LONGEST // size)
        paged = PagedCache(
            CacheShape(
                num_layers=1,
                block_size=size,
                num_kv_heads=self.shape.kv_heads,
                head_dim=self.shape.width,
                dtype=dtype,
            ),
            num_blocks=each * len(self.rows) + 3,
            num_slots=len(self.rows) + 1,
            max_blocks_per_slot=each,
            device=device,
        )
        for tensor in paged.layer(0):
            tensor.fill_(filling)
        order = torch.randperm(each * len(self.rows), generator=torch.Generator().manual_seed(1))
        for slot, (row, cached) in enumerate(zip(self.rows, self.cached, strict=True)):
            blocks, places = order[slot * each : (slot + 1) * each], torch.arange(each)
            table = torch.stack((torch.full_like(places, slot), places, blocks))
            paged.append(table.to(device))
            if row.start:
                positions = torch.arange(row.start, device=device)
                at = paged.locate(torch.full_like(positions, slot), positions)
                paged.write(0, at, *cached.to(device, dtype))
        return paged

    def attend(self, compute: Compute, cache: PagedCache, dtype: torch.dtype) -> torch.Tensor:
        arrays, device = forward_arrays(self.rows), cache.device
        tensors = ForwardTensors(
            *(
                torch.from_numpy(array.copy()).to(device)
                for array in (arrays.tokens, arrays.logits_columns, arrays.chunk_columns)
            )
        )
        heads = replace(
            self.heads,
            qkv_TNK=self.heads.qkv_TNK.to(device, dtype),
            q_norm_K=None if self.heads.q_norm_K is None else self.heads.q_norm_K.to(device, dtype),
            k_norm_K=None if self.heads.k_norm_K is None else self.heads.k_norm_K.to(device, dtype),
        )
        rotation = make_rotation(
            RopeConfig(theta=10000.0),
            head_dim=self.shape.width,
            max_len=LONGEST,
            dtype=dtype,
            device=device,
        )
        return compute.attention(cache, rotation, arrays, tensors)(0, heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_is_the_plain_one(
    shape: Shape, rows: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> None:
    from tpinference_engine.runner.kernel_compute import KernelCompute

    case = Case(shape, dtype, rows)
    # The plain form reads padding and multiplies it by zero; the kernels must not see it at all.
    plain = case.cache(0.0, torch.float32, CPU)
    paged = case.cache(torch.nan, dtype, device)
    expected = case.attend(PlainCompute(), plain, torch.float32)
    kernels = KernelCompute()
    # Twice: what counts the parts must be as it was.
    for _ in range(2):
        found = case.attend(kernels, paged, dtype)
        check(found, expected, dtype)
    for row in case.rows:
        positions = torch.arange(row.start + row.num_tokens)
        at = plain.locate(torch.full_like(positions, row.slot), positions)
        for mine, theirs in zip(paged.layer(0), plain.layer(0), strict=True):
            check(mine.flatten(0, 1)[at.to(device)], theirs.flatten(0, 1)[at], dtype)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    close = TOLERANCE[dtype]
    torch.testing.assert_close(found.float().cpu(), expected, rtol=close, atol=close)


def test_padding_leaves_nothing(device: torch.device) -> None:
    from tpinference_engine.kernels.decode_attention import (
        Arrivals,
        CacheView,
        HeadLayout,
        decode_attention,
    )

    case = Case(SHAPES["smollm2"], torch.float32, [(9, 1), (3, 1)])
    cache = case.cache(0.0, torch.float32, device)
    before = [tensor.clone() for tensor in cache.layer(0)]
    layout = HeadLayout(
        num_heads=9,
        num_kv_heads=3,
        q_norm_K=None,
        k_norm_K=None,
        eps=0.0,
        cos_PK=torch.ones((16, 64), device=device),
        sin_PK=torch.zeros((16, 64), device=device),
    )
    where = torch.zeros(2, dtype=torch.int64, device=device), torch.tensor([-1, -1], device=device)
    view = CacheView(
        keys_NBGK=cache.layer(0)[0], values_NBGK=cache.layer(0)[1], tables_SC=cache.tables_SC
    )
    arrivals = Arrivals(2, 3, device)
    decode_attention(case.heads.qkv_TNK.to(device), layout, view, where, arrivals, 4)
    assert all(map(torch.equal, cache.layer(0), before))
    assert not arrivals.counts.any()
