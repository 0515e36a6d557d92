"""Numbers of many measurements: mean, deviation, percentiles. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Statistic:
    mean: float
    std: float
    percentiles: dict[str, float]
    """By percent, written as short as it can be: "50", "99.9"."""

    @property
    def median(self) -> float:
        return self.percentiles["50"]


def summarize(values: Sequence[float], percents: Sequence[float]) -> Statistic:
    """Percentiles are interpolated; the median is always among them. Of no value, all is 0."""
    sample = np.array(values or (0.0,), dtype=np.float64)
    wanted = sorted({50.0, *percents})
    return Statistic(
        mean=float(sample.mean()),
        std=float(sample.std()),
        percentiles={
            format_percent(percent): float(np.percentile(sample, percent)) for percent in wanted
        },
    )


def format_percent(percent: float) -> str:
    return f"{percent:g}"
