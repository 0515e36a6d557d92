"""The sampler against plain Python, and its noise as a pure function."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from tpinference_engine.runner.noise import gumbel
from tpinference_engine.runner.sampler import SampleTensors, keep, sample

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def plain_mix(x: int) -> int:
    """splitmix64's output function, in Python's integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return x ^ (x >> 31)


def plain_gumbel(seed: int, index: int, token: int) -> float:
    start = plain_mix(plain_mix(seed & _WORD) + index * _GOLDEN & _WORD)
    bits = plain_mix(start + (token + 1) * _GOLDEN & _WORD) >> 12
    return -math.log(-math.log((bits + 0.5) * 2.0**-52))


def plain_keep(scores: Sequence[float], top_k: int, top_p: float) -> set[int]:
    """The smallest set of best tokens, of the top_k best, that holds top_p of their chances."""
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    best = order[: top_k or len(order)]
    chances = [math.exp(scores[token] - scores[best[0]]) for token in best]
    kept: set[int] = set()
    held = 0.0
    for token, chance in zip(best, chances, strict=True):
        if kept and held >= top_p * sum(chances) and top_p < 1:
            break
        kept.add(token)
        held += chance
    return kept


def rows(
    temperatures: Sequence[float],
    *,
    top_p: float = 1.0,
    top_k: int = 0,
    seeds: Sequence[int] | None = None,
    index: int = 0,
) -> SampleTensors:
    count = len(temperatures)
    return SampleTensors(
        logits_rows_R=torch.arange(count),
        slots_R=torch.arange(count),
        seeds_R=torch.tensor(seeds or [0] * count),
        indices_R=torch.full((count,), index),
        top_ks_R=torch.full((count,), top_k),
        temperatures_R=torch.tensor(temperatures, dtype=torch.float64),
        top_ps_R=torch.full((count,), top_p, dtype=torch.float64),
    )


def draw(logits: Sequence[float], count: int, **wanted: float) -> list[int]:
    """`count` draws of seeds 0, 1, 2, … from the same logits."""
    temperature = wanted.pop("temperature", 1.0)
    chosen = rows([temperature] * count, seeds=range(count), **wanted)  # type: ignore[arg-type]
    logits_RV = torch.tensor(logits).repeat(count, 1)
    limited = bool(wanted)
    tokens: list[int] = sample(logits_RV, chosen, torch.arange(count), limited).tolist()
    return tokens


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("index", [0, 1, 4095])
def test_noise_is_the_published_hash(seed: int, index: int) -> None:
    found = gumbel(torch.tensor([seed]), torch.tensor([index]), 50)[0].tolist()
    expected = [plain_gumbel(seed, index, token) for token in range(50)]
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_noise_of_a_row_does_not_depend_on_the_others() -> None:
    seeds, indices = torch.tensor([5, -7, 5, 9]), torch.tensor([0, 3, 1, 8])
    together = gumbel(seeds, indices, 1000)
    for row in range(4):
        alone = gumbel(seeds[row : row + 1], indices[row : row + 1], 1000)
        assert torch.equal(alone[0], together[row])
    assert not torch.equal(together[0], together[2])


def test_noise_has_the_moments_of_gumbel() -> None:
    noise = gumbel(torch.arange(64), torch.arange(64), 4096).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    neighbours = torch.corrcoef(torch.stack((noise[:, :-1].ravel(), noise[:, 1:].ravel())))
    seeds = torch.corrcoef(torch.stack((noise[:-1].ravel(), noise[1:].ravel())))
    assert abs(neighbours[0, 1].item()) < 0.01 and abs(seeds[0, 1].item()) < 0.01


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50, 1000])
def test_kept_tokens_are_those_of_plain_python(top_k: int, top_p: float) -> None:
    source = random.Random(top_k)
    # Rounded, so that there are equal scores.
    scores = [[round(source.gauss(0, 2), 1) for _ in range(50)] for _ in range(20)]
    found = keep(
        torch.tensor(scores),
        torch.full((20,), top_k),
        torch.full((20,), top_p, dtype=torch.float64),
    )
    for row, kept in zip(scores, found, strict=True):
        assert set(kept.nonzero().ravel().tolist()) == plain_keep(row, top_k, top_p)


def test_draws_follow_the_softmax() -> None:
    logits, count = [1.0, 0.0, 2.0, -1.0, 0.5], 20000
    tokens = draw(logits, count, temperature=0.7)
    chances = torch.tensor(logits).div(0.7).softmax(-1).tolist()
    for token, chance in enumerate(chances):
        spread = math.sqrt(count * chance * (1 - chance))
        assert abs(tokens.count(token) - count * chance) < 4 * spread


def test_draws_stay_within_top_k_and_top_p() -> None:
    logits = [3.0, 2.9, 2.8, 0.0, -1.0]
    assert set(draw(logits, 500, top_k=2)) == {0, 1}
    assert set(draw(logits, 500, top_p=0.6)) == {0, 1}
    assert set(draw(logits, 500, top_p=0.6, temperature=100.0)) == {0, 1, 2}
    assert set(draw(logits, 500, top_k=1, temperature=100.0)) == {0}


def test_greedy_and_drawn_rows_do_not_disturb_each_other() -> None:
    logits_RV = torch.tensor([[0.0, 1.0, 0.9]] * 4)
    mixed = rows([0.0, 5.0, 0.0, 5.0], seeds=[1, 2, 3, 4])
    found = sample(logits_RV, mixed, torch.tensor([1, 3]), False).tolist()
    alone = [
        sample(logits_RV[:1], rows([5.0], seeds=[seed]), torch.tensor([0]), False).item()
        for seed in (2, 4)
    ]
    assert found == [1, alone[0], 1, alone[1]]


def test_very_low_temperature_is_greedy() -> None:
    assert set(draw([1.0, 1.01, 0.5], 200, temperature=1e-6)) == {1}
