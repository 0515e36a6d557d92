"""When requests arrive: a Poisson process of a given rate, decided before the first is sent."""

from __future__ import annotations

import math

import numpy as np


def arrival_times_s(num_requests: int, rate: float, *, seed: int) -> tuple[float, ...]:
    """Since the start, in order. The last one is where the rate has it exactly, so that the length
    of a run does not depend on the seed."""
    if math.isinf(rate):
        return (0.0,) * num_requests
    times = np.random.default_rng(seed).exponential(1 / rate, num_requests).cumsum()
    return tuple((times * (num_requests / rate / times[-1])).tolist())
