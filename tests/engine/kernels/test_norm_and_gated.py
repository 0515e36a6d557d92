"""RMSNorm with its sum, and silu · mul, against plain torch."""

from __future__ import annotations

import pytest
import torch

from tpinference_engine.model.ops import TorchOps

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
# Two places of the last digit: sums are added up in another order.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4096), (7, 72), (64, 576), (3, 8192), (0, 64)])
def test_sum_is_kept_and_normed(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    from tpinference_engine.kernels.norm import add_rms_norm, rms_norm

    x, delta, weight = (
        torch.randn(size, generator=generator, device=device).to(dtype)
        for size in (shape, shape, shape[1:])
    )
    total, normed = TorchOps().add_norm(x, delta, weight, EPS)
    alone = TorchOps().norm(x, weight, EPS)
    torch.testing.assert_close(
        rms_norm(x, weight, EPS), alone, rtol=CLOSE[dtype], atol=CLOSE[dtype]
    )
    found_total, found = add_rms_norm(x, delta, weight, EPS)
    torch.testing.assert_close(found_total, total, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    torch.testing.assert_close(found, normed, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_norm_takes_rows_of_a_wider_tensor(
    device: torch.device, generator: torch.Generator
) -> None:
    from tpinference_engine.kernels.norm import rms_norm

    wide = torch.randn((5, 200), generator=generator, device=device)
    weight = torch.randn(72, generator=generator, device=device)
    part = wide[:, :72]
    torch.testing.assert_close(rms_norm(part, weight, EPS), TorchOps().norm(part, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 14336), (9, 101), (33, 1536), (0, 8)])
def test_gate_is_applied(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    from tpinference_engine.kernels.gated import silu_gated

    merged = torch.randn((shape[0], 2 * shape[1]), generator=generator, device=device).to(dtype)
    gate, up = merged.float().chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    torch.testing.assert_close(silu_gated(merged), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
