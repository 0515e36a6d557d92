"""One cell, measured in a process of its own: ranks up, batches, ranks gone."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from step_benchmark.cell import Cell
from step_benchmark.messages import Shape, number_steps, plan_batch
from step_benchmark.paced import PacedDriver
from step_benchmark.pipeline import RayPipeline, StepDriver, ThreadRanks
from step_benchmark.runners import runner_factory
from tpinference_engine.config import EngineConfig
from tpinference_engine.executor.factory import make_executor
from tpinference_engine.step import StepInput
from tpinference_engine.worker import SWITCH_INTERVAL_S

EPOCH = 1
_STEP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    cell: Cell
    shape: Shape
    model: Path | None
    amount: float | None
    """Of the runner: see `runner_factory`."""
    ray_address: str | None
    num_warmups: int
    num_batches: int
    host_work_s: float
    paced: bool
    """Whether steps that the product would send are sent when it would."""


def measure(task: Task) -> tuple[float, ...]:
    """Seconds of each batch."""
    driver = _start(task)
    try:
        _check_placement(task.cell, driver)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        batches = _number_batches(task)
        gc.collect()
        gc.freeze()
        times = [_run_batch(driver, batch, task) for batch in batches]
        return tuple(times[task.num_warmups :])
    finally:
        driver.shutdown()


def engine_config(task: Task) -> EngineConfig:
    cell, shape = task.cell, task.shape
    return EngineConfig(
        model=task.model or Path(),
        served_model_name=("benchmark",),
        device="cuda" if cell.device == "cuda" else "cpu",
        dtype="auto" if cell.device == "cuda" else "float32",
        tensor_parallel_size=cell.tp,
        max_model_len=shape.max_model_len,
        max_num_seqs=shape.batch_size,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        block_size=shape.block_size,
        num_gpu_blocks_override=shape.batch_size * shape.blocks_per_slot,
        # Ranks as threads meet at a store of this machine, as processes do.
        distributed_executor_backend="mp" if cell.is_baseline and cell.tp > 1 else cell.backend,
        step_transport="actor-call" if cell.transport == "actor-call" else "compiled-graph",
        step_timeout_s=_STEP_TIMEOUT_S,
        ray_address=task.ray_address,
        engine_id="benchmark",
        epoch=EPOCH,
    )


def _start(task: Task) -> StepDriver:
    cell, config = task.cell, engine_config(task)
    max_model_len = task.shape.max_model_len
    factory = runner_factory(cell.device, task.amount, cell.returns)
    if cell.in_flight > 1:
        return RayPipeline(config, max_model_len, factory, cell.in_flight)
    if cell.is_baseline and cell.tp > 1:
        return ThreadRanks(config, factory)
    executor = make_executor(config, max_model_len, factory)
    executor.start(lambda stage: None)
    if task.paced and cell.returns == "lagged" and not cell.is_baseline:
        return PacedDriver(executor, "cpu" if cell.device == "cpu" else "cuda")
    return executor


def _check_placement(cell: Cell, driver: StepDriver) -> None:
    """A figure under a wrong name would be worse than none."""
    if cell.backend != "ray":
        return
    import ray

    here = ray.get_runtime_context().get_node_id()
    shared = {place.node == here for place in driver.places}
    if shared != {cell.placement == "same"}:
        raise RuntimeError(
            f"ranks are on {[place.node for place in driver.places]}, the driver on {here}: "
            f"not {cell.placement!r}"
        )


def _number_batches(task: Task) -> list[tuple[StepInput, ...]]:
    batches: list[tuple[StepInput, ...]] = []
    step_id = 0
    for iteration in range(task.num_warmups + task.num_batches):
        steps = plan_batch(task.shape, task.cell.returns, iteration)
        batches.append(number_steps(steps, step_id, EPOCH))
        step_id += len(steps)
    return batches


def _run_batch(driver: StepDriver, steps: Sequence[StepInput], task: Task) -> float:
    began = time.perf_counter()
    num_open = 0
    for step in steps:
        if num_open == task.cell.in_flight:
            driver.collect()
            num_open -= 1
            _work(task.host_work_s)
        driver.submit(step)
        num_open += 1
    for _ in range(num_open):
        driver.collect()
    return time.perf_counter() - began


def _work(seconds: float) -> None:
    """What a scheduler does between two calls, emulated."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
