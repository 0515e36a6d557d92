"""Products of a few rows against plain torch in float32."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize(
    ("rows", "outputs", "width"),
    [
        (1, 256, 512),
        (1, 70, 576),
        (1, 96, 64),
        (8, 96, 256),
        (16, 70, 576),
        (3, 1536, 576),
        (2, 200, 1088),
    ],
)
def test_product_is_that_of_torch(  # noqa: PLR0913
    rows: int,
    outputs: int,
    width: int,
    gated: bool,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    from tpinference_engine.kernels.linear import Tiling, batch_linear, fits, row_linear

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    x, w = random(rows, width), random((2 if gated else 1) * outputs, width) * width**-0.5
    b = random(len(w)) if bias else None
    y = torch.full((rows, outputs), torch.nan, device=device, dtype=torch.float32)
    row, batch = Tiling(block_n=4, block_k=256), Tiling(block_n=16, block_k=64, stages=3)
    assert fits(x, w)
    if rows == 1:
        found = row_linear(x, w, b, y, row, gated=gated)
    else:
        found = batch_linear(x, w, b, y, batch, gated=gated)
    expected = torch.nn.functional.linear(x.float(), w.float(), None if b is None else b.float())
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (17, 64, torch.bfloat16),
        (1, 72, torch.bfloat16),
        (1, 64, torch.float32),
        (0, 64, torch.half),
    ],
    ids=["too many rows", "odd width", "float32", "no rows"],
)
def test_what_does_not_fit_is_left_to_others(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    from tpinference_engine.kernels.linear import fits
    from tpinference_engine.kernels.ops import KernelOps

    x = torch.randn((rows, width), generator=generator, device=device).to(dtype)
    w = torch.randn((48, width), generator=generator, device=device).to(dtype)
    assert not fits(x, w)
    expected = torch.nn.functional.linear(x, w)
    torch.testing.assert_close(KernelOps().linear(x, w), expected)
