"""Prompts without meaning: seeded token ids, so that a run can be repeated."""

from __future__ import annotations

import numpy as np

TokenIds = tuple[int, ...]


def random_prompts(
    num_prompts: int, length: int, *, vocab_size: int, seed: int
) -> tuple[TokenIds, ...]:
    rows = np.random.default_rng(seed).integers(0, vocab_size, (num_prompts, length))
    return tuple(tuple(row) for row in rows.tolist())
