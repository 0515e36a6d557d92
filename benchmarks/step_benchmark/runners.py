"""Ranks for the benchmark: an emulated device, and a return without the lag.

They stand behind the product's own `Runner`, so worker, executor and transport are the product's.
Importing it costs no torch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from step_benchmark.cell import Return
from tpinference_engine.config import EngineConfig
from tpinference_engine.runner.base import PendingTokens, RankSetup, Runner, RunnerFactory
from tpinference_engine.step import StepInput

_SPIN_S = 0.0002
"""Before the end of a wait: a sleeping thread wakes up too late for a step's grain."""


def runner_factory(device: str, amount: float | None, returns: Return) -> RunnerFactory:
    """`amount`: seconds of an emulated step, layers of a captured one, None for the model."""
    if amount is None:
        make: RunnerFactory = _make_model_runner
    elif device == "cuda":
        make = partial(_make_cuda_graph_runner, int(amount))
    else:
        make = partial(EmulatedRunner, step_s=amount)
    return partial(_make_sync, make) if returns == "sync" else make


def _make_model_runner(config: EngineConfig) -> Runner:
    from tpinference_engine.runner.model_runner import ModelRunner

    return ModelRunner(config)


def _make_cuda_graph_runner(num_layers: int, config: EngineConfig) -> Runner:
    from step_benchmark.cuda_graph import CudaGraphRunner

    return CudaGraphRunner(config, num_layers)


def _make_sync(make: RunnerFactory, config: EngineConfig) -> Runner:
    return cast(Runner, SyncReturn(make(config)))


class SyncReturn:
    """Call N samples what its own forward computed: the design that the lag replaces.

    Each call becomes two of the runner behind: STATE and FORWARD, then SAMPLE.
    """

    def __init__(self, lagged: Runner) -> None:
        self._lagged = lagged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lagged, name)

    def enqueue(self, step: StepInput) -> PendingTokens:
        self._lagged.enqueue(replace(step, sample=()))
        return self._lagged.enqueue(StepInput(step.step_id, step.epoch, 0, sample=step.sample))


@dataclass(frozen=True, slots=True)
class _EmulatedTokens:
    ready_s: float
    num_tokens: int

    def wait(self) -> list[int]:
        time.sleep(max(0.0, self.ready_s - time.perf_counter() - _SPIN_S))
        while time.perf_counter() < self.ready_s:
            pass
        return [0] * self.num_tokens


class EmulatedRunner:
    """A device that is a timetable: every forward takes `step_s`, and a sample takes nothing."""

    def __init__(self, config: EngineConfig, *, step_s: float) -> None:
        self._step_s = step_s
        self._num_blocks = config.num_gpu_blocks_override or 1
        self._busy_until_s = 0.0

    def open_store(self, address: str) -> tuple[str, int]:
        return address, 0

    def initialize(self, setup: RankSetup) -> None:
        """Emulated ranks share nothing."""

    def load_model(self) -> int:
        return 0

    def cache_capacity(self) -> int:
        return self._num_blocks

    def allocate_cache(self, num_blocks: int) -> None:
        """Nothing is kept."""

    def warm_up(self) -> None:
        """Nothing is slow the first time."""

    def enqueue(self, step: StepInput) -> _EmulatedTokens:
        sampled = max(self._busy_until_s, time.perf_counter())
        self._busy_until_s = sampled + (self._step_s if step.forward else 0.0)
        return _EmulatedTokens(sampled, len(step.sample))

    def idle(self) -> None:
        """Nothing is queued that anybody could see."""

    def close(self) -> None:
        """Nothing is held."""
