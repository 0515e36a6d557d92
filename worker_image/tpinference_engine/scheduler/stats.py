"""What a scheduler has counted since it began. Plain data, for metrics alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    prefix_cache_queries: int = 0
    """Tokens of requests that were looked up; a replay after a preemption is not looked at."""
    prefix_cache_hits: int = 0
    """Those of them that were found computed already."""
    num_preemptions: int = 0
