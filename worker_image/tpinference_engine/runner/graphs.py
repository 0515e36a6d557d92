"""CUDA graphs of steps that are all decodes: one a size, chosen by the driver's bucket.

A graph is a forward pass with its shapes fixed: fewer rows are filled up with padding, which is at
position -1 and leaves nothing. Which one runs follows from the message alone, so all ranks choose
alike. Everything here runs in the device queue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from tpinference_engine.runner.batch import PADDING_POSITION

Forward = Callable[[torch.Tensor], torch.Tensor]
"""tokens_3T → logits_TV"""


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two, as the driver's buckets are, up to the first that holds all rows."""
    return tuple(1 << power for power in range((max_rows - 1).bit_length() + 1))


class DecodeGraphs:
    """Empty until `capture`; then `sizes` are there, in ascending order."""

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = ()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._tokens: torch.Tensor | None = None

    def capture(self, forward: Forward, sizes: Sequence[int], device: torch.device) -> None:
        pool = torch.cuda.graph_pool_handle()
        self._tokens = torch.zeros(3 * max(sizes), dtype=torch.int64, device=device)
        # The largest first: the others then fit into the memory that it took.
        for size in sorted(sizes, reverse=True):
            tokens_3T = self._inputs(size)
            tokens_3T[2] = PADDING_POSITION
            # Once outside, so that kernels are compiled and libraries have what they need.
            forward(tokens_3T)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            # Other threads of this process may call CUDA meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                logits_TV = forward(tokens_3T)
            finally:
                graph.capture_end()
            self._graphs[size] = graph, logits_TV
        self.sizes = tuple(sorted(sizes))

    def size_for(self, bucket: int) -> int:
        """Of the smallest graph that holds `bucket` tokens; 0 if none does."""
        at = bisect_left(self.sizes, bucket)
        return self.sizes[at] if bucket and at < len(self.sizes) else 0

    def replay(self, tokens_3T: torch.Tensor) -> torch.Tensor:
        """`tokens_3T` is as wide as one of `sizes`. The logits stay until the next replay."""
        size = tokens_3T.shape[1]
        graph, logits_TV = self._graphs[size]
        self._inputs(size).copy_(tokens_3T)
        graph.replay()
        return logits_TV

    def _inputs(self, size: int) -> torch.Tensor:
        assert self._tokens is not None, "capture comes first"
        return self._tokens[: 3 * size].view(3, size)
