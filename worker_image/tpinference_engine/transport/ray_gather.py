"""Answers of one plain call to every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from tpinference_engine.errors import StepTimedOut
from tpinference_engine.transport.ray_failure import translate_ray_failure


def gather(refs: Sequence[Any], timeout_s: float | None, doing: str) -> list[Any]:
    """All ranks' answers in rank order; the first rank that fails ends the wait for the others.

    The others may be waiting for it in a collective, for good.
    """
    rank_of = {ref: rank for rank, ref in enumerate(refs)}
    answers: dict[int, Any] = {}
    pending = list(refs)
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while pending:
        left = None if end is None else max(0.0, end - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not ready:
            raise StepTimedOut.without([rank_of[ref] for ref in pending], doing, timeout_s)
        for ref in ready:
            answers[rank_of[ref]] = _answer(ref, rank_of[ref], doing)
    return [answers[rank] for rank in range(len(refs))]


def _answer(ref: Any, rank: int, doing: str) -> Any:
    try:
        return ray.get(ref)
    except Exception as error:
        raise translate_ray_failure(error, rank, doing) from error
