"""The engine core's part of an echo run, a process of its own beside the head's raylet.

It sends steps and checks every token. It does not know what the network does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from step_benchmark.pipeline import RayPipeline, StepDriver

from soak_benchmark.driver_report import Reports
from soak_benchmark.traffic import SHAPE, KnownStep, known_steps
from tpinference_engine.config import EngineConfig
from tpinference_engine.executor.factory import make_executor
from tpinference_engine.runner.echo import EchoRunner
from tpinference_engine.step import StepOutput
from tpinference_engine.worker import SWITCH_INTERVAL_S

_EPOCH = 1
_MAX_EXAMPLES = 5
_MAX_MESSAGE = 1500
_PERCENTILES = (50.0, 99.0, 100.0)
_SLOW_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoTask:
    ray_address: str
    num_ranks: int
    in_flight: int
    phases: Sequence[int]
    """Steps of each."""
    seed: int
    step_timeout_s: float
    report_every_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=json.loads)
    task = EchoTask(**parser.parse_args().task)
    reports = Reports()
    EchoRun(task, _start(task), reports).run()


def _start(task: EchoTask) -> StepDriver:
    config = EngineConfig(
        model=Path(),
        served_model_name=("echo",),
        device="cpu",
        tensor_parallel_size=task.num_ranks,
        max_model_len=SHAPE.max_model_len,
        max_num_seqs=SHAPE.batch_size,
        max_num_batched_tokens=SHAPE.max_num_batched_tokens,
        block_size=SHAPE.block_size,
        num_gpu_blocks_override=SHAPE.batch_size * SHAPE.blocks_per_slot,
        step_timeout_s=task.step_timeout_s,
        startup_timeout_s=120.0,
        ray_address=task.ray_address,
        engine_id="soak",
        epoch=_EPOCH,
    )
    if task.in_flight > 1:
        return RayPipeline(config, SHAPE.max_model_len, EchoRunner, task.in_flight)
    executor = make_executor(config, SHAPE.max_model_len, EchoRunner)
    executor.start(lambda stage: None)
    return executor


class EchoRun:
    def __init__(self, task: EchoTask, driver: StepDriver, reports: Reports) -> None:
        self._task = task
        self._driver = driver
        self._reports = reports
        self._steps = known_steps(_EPOCH, task.seed)
        self._open: deque[tuple[KnownStep, float]] = deque()
        self._num_steps = 0
        self._num_wrong = 0
        # Made and touched at once, so that it is no growth.
        self._times_s = np.full(max(task.phases), 0.0, dtype=np.float32)

    def run(self) -> None:
        ranks = {f"rank {place.rank}": place.pid for place in self._driver.places}
        self._reports.send("started", pids={"driver": os.getpid(), **ranks})
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()
        began_s = time.monotonic()
        try:
            for number, num_steps in enumerate(self._task.phases):
                self._reports.wait_for_network(number)
                began_s = time.monotonic()
                self._run_phase(number, num_steps)
        # The outermost frame: whatever stops a run is what it has found.
        except Exception as error:
            self._report_failure(error, time.monotonic() - began_s)
        began_s = time.monotonic()
        self._driver.shutdown()
        self._reports.send("ended", shutdown_s=time.monotonic() - began_s)

    def _run_phase(self, number: int, num_steps: int) -> None:
        began_s = time.monotonic()
        for at in range(num_steps):
            if len(self._open) == self._task.in_flight:
                self._collect(at - len(self._open))
            known = next(self._steps)
            self._driver.submit(known.step)
            self._open.append((known, time.perf_counter()))
        while self._open:
            self._collect(num_steps - len(self._open))
        seconds = time.monotonic() - began_s
        found = np.percentile(self._times_s[:num_steps], _PERCENTILES)
        times = {f"p{p:g}_ms": float(1e3 * t) for p, t in zip(_PERCENTILES, found, strict=True)}
        counts = {"total": self._num_steps, "wrong": self._num_wrong}
        counts["slow"] = int((self._times_s[:num_steps] > _SLOW_S).sum())
        self._reports.send(
            "passed", number=number, steps=num_steps, seconds=seconds, **times, **counts
        )

    def _collect(self, at: int) -> None:
        output = self._driver.collect()
        known, sent_s = self._open.popleft()
        self._times_s[at] = time.perf_counter() - sent_s
        self._check(known, output)
        self._num_steps += 1
        if self._reports.silent_s > self._task.report_every_s:
            self._reports.send("progress", total=self._num_steps, wrong=self._num_wrong)

    def _check(self, known: KnownStep, output: StepOutput) -> None:
        if output.tokens == known.tokens:
            return
        self._num_wrong += 1
        if self._num_wrong <= _MAX_EXAMPLES:
            self._reports.send(
                "wrong", step=output.step_id, got=output.tokens, expected=known.tokens
            )

    def _report_failure(self, error: Exception, after_s: float) -> None:
        cause = error.__cause__
        self._reports.send(
            "failed",
            kind=type(error).__name__,
            message=str(error)[-_MAX_MESSAGE:],
            rank=getattr(error, "rank", None),
            cause=None if cause is None else f"{type(cause).__name__}: {cause}"[-_MAX_MESSAGE:],
            steps=self._num_steps,
            wrong=self._num_wrong,
            after_s=after_s,
        )


if __name__ == "__main__":
    main()
