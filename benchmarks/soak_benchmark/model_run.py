"""A whole engine with a real model, a process of its own: batch after batch, greedy and in float32.

Its tokens are for somebody else to compare. It does not know whether a network is emulated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from step_benchmark.processes import ENGINE_CORE, children_that_run

from soak_benchmark.driver_report import Reports
from tpinference_engine.bench.engine_run import running_engine
from tpinference_engine.bench.prompt import TokenIds, random_prompts
from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.model.config import read_model_config
from tpinference_engine.request import Request, SamplingParams

BATCH_SIZE = 4
_INPUT_LEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTask:
    model: str
    ray_address: str
    num_ranks: int
    num_batches: int
    output_len: int
    """Of each batch, which takes at least one step more."""
    seed: int
    step_timeout_s: float
    report_every_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=json.loads)
    task = ModelTask(**parser.parse_args().task)
    asyncio.run(ModelRun(task, Reports()).run())


class ModelRun:
    def __init__(self, task: ModelTask, reports: Reports) -> None:
        self._task = task
        self._reports = reports
        self._num_steps = 0

    async def run(self) -> None:
        task = self._task
        config = EngineConfig(
            model=Path(task.model),
            served_model_name=("soak",),
            device="cpu",
            dtype="float32",
            tensor_parallel_size=task.num_ranks,
            max_model_len=_INPUT_LEN + task.output_len,
            max_num_seqs=BATCH_SIZE,
            step_timeout_s=task.step_timeout_s,
            startup_timeout_s=300.0,
            ray_address=task.ray_address,
            engine_id="soak",
        )
        began_s = time.monotonic()
        try:
            async with running_engine(config, BATCH_SIZE) as engine:
                await self._report_start(engine)
                for number in range(task.num_batches):
                    self._reports.wait_for_network(number)
                    began_s = time.monotonic()
                    await self._run_batch(engine, number)
                began_s = time.monotonic()
        # The outermost frame: whatever stops a run is what it has found.
        except Exception as error:
            self._reports.send(
                "failed",
                kind=type(error).__name__,
                message=str(error),
                steps=self._num_steps,
                wrong=0,
                after_s=time.monotonic() - began_s,
            )
        else:
            self._reports.send("ended", shutdown_s=time.monotonic() - began_s)

    async def _report_start(self, engine: AsyncEngine) -> None:
        (core,) = children_that_run(ENGINE_CORE)
        places = await engine.collective_rpc("place")
        ranks = {f"rank {rank}": place["pid"] for rank, place in enumerate(places)}
        self._reports.send("started", pids={"API server": os.getpid(), "driver": core, **ranks})

    async def _run_batch(self, engine: AsyncEngine, number: int) -> None:
        task, began_s = self._task, time.monotonic()
        vocab_size = read_model_config(Path(task.model)).vocab_size
        prompts = random_prompts(
            BATCH_SIZE, _INPUT_LEN, vocab_size=vocab_size, seed=task.seed + number
        )
        names = [f"{number}-{index}" for index in range(BATCH_SIZE)]
        tokens = await asyncio.gather(*map(self._generate, [engine] * BATCH_SIZE, names, prompts))
        self._num_steps += task.output_len
        self._reports.send(
            "passed",
            number=number,
            steps=task.output_len,
            seconds=time.monotonic() - began_s,
            tokens=tokens,
            total=self._num_steps,
            wrong=0,
        )

    async def _generate(self, engine: AsyncEngine, name: str, prompt: TokenIds) -> list[int]:
        params = SamplingParams(max_tokens=self._task.output_len, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, prompt_token_ids=prompt, params=params)
        tokens: list[int] = []
        async for output in engine.generate(request):
            tokens += output.token_ids
            if output.error:
                raise RuntimeError(output.error)
            if self._reports.silent_s > self._task.report_every_s:
                self._reports.send("progress", total=self._num_steps + len(tokens), wrong=0)
        return tokens


if __name__ == "__main__":
    main()
