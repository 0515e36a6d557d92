"""Counts one call as its pieces pass: the usage that its answer tells, and the engine's metrics."""

from __future__ import annotations

import time

from tpinference_engine.server.answer import Usage
from tpinference_engine.server.generation import Piece
from tpinference_engine.server.metrics import Metrics


class Tally:
    def __init__(self, metrics: Metrics, num_prompt_tokens: int, arrived: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._arrived = arrived
        self._last_token: dict[int, float] = {}
        metrics.prompt_tokens.inc(num_prompt_tokens)

    @property
    def usage(self) -> Usage:
        return Usage(self._num_prompt_tokens, self._num_output_tokens)

    def count(self, index: int, piece: Piece) -> None:
        num_tokens = len(piece.token_ids)
        self._num_output_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)
        if num_tokens:
            self._observe_tokens(index, num_tokens, time.monotonic())
        if piece.ending:
            self._metrics.count_success(piece.ending)

    def finish(self) -> None:
        self._metrics.request_latency.observe(time.monotonic() - self._arrived)
        self._metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
        self._metrics.request_generation_tokens.observe(self._num_output_tokens)

    def _observe_tokens(self, index: int, num_tokens: int, now: float) -> None:
        last = self._last_token.get(index)
        self._last_token[index] = now
        if last is None:
            self._metrics.time_to_first_token.observe(now - self._arrived)
            return
        for _ in range(num_tokens):
            self._metrics.inter_token_latency.observe((now - last) / num_tokens)
