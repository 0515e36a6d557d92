"""Host memory that a step's arrays are copied to the device from, in one copy.

Two buffers in turn are enough: call N+2 is packed only after the sample of call N+1 has passed, and
one queue orders that after everything call N queued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tpinference_engine.runner.batch import Longs

NUM_BUFFERS = 2
MIN_WORDS = 4096


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [self._allocate(MIN_WORDS) for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def pack(self, arrays: Sequence[Longs]) -> Callable[[], list[torch.Tensor]]:
        """Copies them here now; what is returned is called in the queue, to copy them on."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        total = sum(array.size for array in arrays)
        if total > len(self._buffers[self._turn]):
            self._buffers[self._turn] = self._allocate(2 * total)
        host = self._buffers[self._turn][:total]
        view, at = host.numpy(), 0
        for array in arrays:
            view[at : at + array.size] = array.ravel()
            at += array.size
        sizes = [array.size for array in arrays]
        shapes = [array.shape for array in arrays]

        def unpack() -> list[torch.Tensor]:
            there = host.to(self._device, non_blocking=True, copy=True)
            parts = torch.split(there, sizes)
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        return unpack

    def _allocate(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64, pin_memory=self._device.type == "cuda")
