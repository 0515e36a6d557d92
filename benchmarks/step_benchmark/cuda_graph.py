"""A rank whose step is a captured CUDA graph of a wanted length, and no model.

Matrix products of a small batch with large weights, one after the other: like a decode, it reads
the device's memory and computes little. Ranks do not talk to each other, so it measures how steps
reach them, and not NCCL.
"""

from __future__ import annotations

import torch

from tpinference_engine.config import EngineConfig
from tpinference_engine.runner.base import RankSetup
from tpinference_engine.runner.device_queue import QueuedTokens, make_queue, run
from tpinference_engine.step import StepInput

_HIDDEN = 8192
_NUM_WEIGHTS = 4
"""Of 128 MiB each, used in turn: more than the device's own cache holds."""
_CALIBRATION_LAYERS = 64
_CALIBRATION_REPLAYS = 50


class CudaGraphRunner:
    def __init__(self, config: EngineConfig, num_layers: int) -> None:
        self._num_layers = num_layers
        self._batch_size = config.max_num_seqs
        self._num_blocks = config.num_gpu_blocks_override or 1
        self._turn = 0

    def open_store(self, address: str) -> tuple[str, int]:
        return address, 0

    def initialize(self, setup: RankSetup) -> None:
        self._queue = make_queue(torch.device("cuda", setup.device_index), setup.num_threads)

    def load_model(self) -> int:
        return run(self._queue, self._allocate)

    def cache_capacity(self) -> int:
        return self._num_blocks

    def allocate_cache(self, num_blocks: int) -> None:
        """Nothing is kept."""

    def warm_up(self) -> None:
        self._graph = run(self._queue, self._capture)
        self.enqueue(StepInput(0, 0, 0)).wait()

    def enqueue(self, step: StepInput) -> QueuedTokens:
        self._turn = 1 - self._turn
        output = self._outputs[self._turn][: len(step.sample)]

        def sample() -> None:
            output.copy_(self._hidden.argmax(-1)[: len(output)], non_blocking=True)

        ticket = self._queue.submit(sample)
        if step.forward:
            self._queue.submit(self._graph.replay)
        return QueuedTokens(ticket, output)

    def idle(self) -> None:
        self._queue.submit(lambda: None).wait()

    def close(self) -> None:
        self._queue.close()

    def _allocate(self) -> int:
        scale = _HIDDEN**-0.5
        self._weights = [self._random(_HIDDEN).mul_(scale) for _ in range(_NUM_WEIGHTS)]
        self._hidden = self._random(self._batch_size)
        self._outputs = torch.zeros((2, self._batch_size), dtype=torch.int64, pin_memory=True)
        return sum(weight.nbytes for weight in self._weights)

    def _random(self, num_rows: int) -> torch.Tensor:
        return torch.randn(num_rows, _HIDDEN, dtype=torch.bfloat16, device=self._queue.device)

    def _capture(self) -> torch.cuda.CUDAGraph:
        # Once without the graph: the library under the products makes its plans.
        self._run_layers()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # Of this thread alone: Ray's graph thread may just be setting the device up.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._run_layers()
        return graph

    def _run_layers(self) -> None:
        hidden = self._hidden
        for layer in range(self._num_layers):
            hidden = hidden @ self._weights[layer % _NUM_WEIGHTS]
        self._hidden.copy_(hidden)

    def measure_alone_ms(self) -> float:
        """One replay's time on the device, with the next one queued behind it."""

        def replay() -> float:
            began, ended = _timer(), _timer()
            began.record()
            for _ in range(_CALIBRATION_REPLAYS):
                self._graph.replay()
            ended.record()
            ended.synchronize()
            return float(began.elapsed_time(ended)) / _CALIBRATION_REPLAYS

        return run(self._queue, replay)


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def count_layers(config: EngineConfig, step_ms: float) -> tuple[int, float]:
    """How many layers take about `step_ms`, and the milliseconds that they take alone."""
    per_layer_ms = _alone_ms(config, _CALIBRATION_LAYERS) / _CALIBRATION_LAYERS
    num_layers = max(1, round(step_ms / per_layer_ms))
    return num_layers, _alone_ms(config, num_layers)


def _alone_ms(config: EngineConfig, num_layers: int) -> float:
    runner = CudaGraphRunner(config, num_layers)
    runner.initialize(RankSetup(rank=0, store=None, address="", device_index=0, num_threads=1))
    runner.load_model()
    runner.warm_up()
    alone_ms = runner.measure_alone_ms()
    runner.close()
    return alone_ms
