"""The pure parts of `bench`: statistics, prompts, arrivals."""

from __future__ import annotations

import math

import pytest

from tpinference_engine.bench.arrival import arrival_times_s
from tpinference_engine.bench.prompt import random_prompts
from tpinference_engine.bench.statistic import summarize


def test_percentiles_are_interpolated_and_the_median_is_always_there() -> None:
    found = summarize([4.0, 1.0, 3.0, 2.0], [10.0, 99.9])
    assert found.mean == 2.5
    assert found.median == 2.5
    assert found.std == pytest.approx(math.sqrt(1.25))
    assert found.percentiles == {
        "10": pytest.approx(1.3),
        "50": 2.5,
        "99.9": pytest.approx(3.997),
    }


def test_one_value_is_every_percentile() -> None:
    assert summarize([7.0], [0.0, 100.0]).percentiles == {"0": 7.0, "50": 7.0, "100": 7.0}


def test_no_value_is_zero() -> None:
    """One output token has no time after the first."""
    found = summarize([], [99.0])
    assert (found.mean, found.std, found.percentiles) == (0.0, 0.0, {"50": 0.0, "99": 0.0})


def test_prompts_repeat_with_their_seed_and_stay_in_the_vocabulary() -> None:
    prompts = random_prompts(20, 30, vocab_size=11, seed=3)
    assert prompts == random_prompts(20, 30, vocab_size=11, seed=3)
    assert prompts != random_prompts(20, 30, vocab_size=11, seed=4)
    assert {len(prompt) for prompt in prompts} == {30}
    assert {token for prompt in prompts for token in prompt} == set(range(11))
    assert all(type(token) is int for token in prompts[0])


def test_all_arrive_at_once_at_an_infinite_rate() -> None:
    assert arrival_times_s(3, math.inf, seed=0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("rate", [0.5, 4.0, 1000.0])
def test_arrivals_are_in_order_and_have_the_wanted_rate(rate: float) -> None:
    times = arrival_times_s(500, rate, seed=1)
    assert list(times) == sorted(times)
    assert times[0] > 0
    assert times[-1] == pytest.approx(500 / rate)
    assert times != arrival_times_s(500, rate, seed=2)


def test_arrivals_are_random_as_a_poisson_process_is() -> None:
    times = arrival_times_s(20_000, 1.0, seed=5)
    gaps = [later - sooner for sooner, later in zip(times, times[1:], strict=False)]
    found = summarize(gaps, [])
    # Of an exponential distribution the deviation is the mean, and the median ln 2 of it.
    assert found.std == pytest.approx(found.mean, rel=0.05)
    assert found.median == pytest.approx(math.log(2) * found.mean, rel=0.05)
