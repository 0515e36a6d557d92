"""Chosen tokens against the plain sampler: greedy, drawn, mixed, with ties and NaN."""

from __future__ import annotations

import pytest
import torch

from tpinference_engine.runner.sampler import sample, unpack_sample

pytestmark = pytest.mark.gpu


def columns(
    temperatures: list[float], device: torch.device, logits_rows: list[int] | None = None
) -> torch.Tensor:
    count = len(temperatures)
    integers = torch.tensor(
        [
            logits_rows or list(range(count)),
            [count - 1 - row for row in range(count)],
            [row * 7919 - 3 for row in range(count)],
            list(range(count)),
            [0] * count,
        ]
    )
    floats = torch.tensor([temperatures, [1.0] * count], dtype=torch.float64).view(torch.int64)
    return torch.cat((integers, floats)).to(device)


@pytest.mark.parametrize("vocab_size", [64, 199, 49152, 128256])
@pytest.mark.parametrize("temperatures", [[0.0], [0.0, 0.7, 0.0, 1.5], [1.0] * 5])
def test_tokens_are_those_of_the_plain_sampler(
    vocab_size: int,
    temperatures: list[float],
    device: torch.device,
    generator: torch.Generator,
) -> None:
    from tpinference_engine.kernels.sampling import choose_tokens

    count = len(temperatures)
    logits = 3 * torch.randn((count, vocab_size + 64), generator=generator, device=device)
    logits = logits[:, :vocab_size]
    found_columns = columns(temperatures, device, list(range(count))[::-1])
    last = torch.full((count + 2,), -1, device=device)
    found = choose_tokens(logits, found_columns, last)
    rows = unpack_sample(found_columns)
    random = torch.tensor([i for i, t in enumerate(temperatures) if t], device=device).long()
    expected = sample(logits[rows.logits_rows_R], rows, random, False)
    assert found.tolist() == expected.tolist()
    assert last.tolist() == [*expected.tolist()[::-1], -1, -1]


def test_ties_go_to_the_smaller_token_and_nan_is_greatest(device: torch.device) -> None:
    from tpinference_engine.kernels.sampling import choose_tokens

    logits = torch.zeros((4, 5000), device=device)
    logits[0, [4999, 1023, 2048]] = 1.0
    logits[1, [3000, 17]] = torch.nan
    logits[2] = -torch.inf
    last = torch.zeros(4, dtype=torch.int64, device=device)
    assert choose_tokens(logits, columns([0.0] * 4, device), last).tolist() == [1023, 17, 0, 0]
