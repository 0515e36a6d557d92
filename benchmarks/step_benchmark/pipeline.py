"""Ways to drive ranks that the product has not: several calls in a graph at once, ranks as threads.

Both look like an Executor's step path. The product keeps one call in flight, on purpose; that is
what the first one is here to be compared with.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from tpinference_engine.config import EngineConfig
from tpinference_engine.executor.acknowledgement import reconcile_outputs
from tpinference_engine.executor.base import RankPlace
from tpinference_engine.executor.bring_up import Arguments, bring_up, read_places
from tpinference_engine.executor.deadline import Deadline
from tpinference_engine.executor.ray_environment import prepare_ray_environment
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.step import StepInput, StepOutput, decode_output, encode_input
from tpinference_engine.worker import Worker


class StepDriver(Protocol):
    """The part of an Executor that a benchmark uses."""

    @property
    def places(self) -> tuple[RankPlace, ...]: ...

    def submit(self, step: StepInput) -> None: ...

    def collect(self) -> StepOutput:
        """Of the oldest step that was not collected."""

    def shutdown(self) -> None: ...


class RayPipeline:
    """Up to `in_flight` calls in one compiled graph, or as many plain calls."""

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        factory: RunnerFactory,
        in_flight: int,
    ) -> None:
        # Before anything imports ray, which reads part of its settings then.
        prepare_ray_environment(os.environ)
        from tpinference_engine.executor.rank_group import RankGroup
        from tpinference_engine.executor.ray_cluster import RayCluster

        self._config = config
        self._limits = config.step_limits(max_model_len)
        self._in_flight = in_flight
        self._cluster = RayCluster(config.ray_address, config.tensor_parallel_size)
        self._group = RankGroup(config, self._cluster)
        self._graph: Any = None
        self._calls: deque[tuple[StepInput, Sequence[Any]]] = deque()
        self._start(factory)

    def _start(self, factory: RunnerFactory) -> None:
        deadline = Deadline.after(self._config.startup_timeout_s)
        self._cluster.join(deadline)
        self._group.place(factory, deadline)
        bring_up(
            lambda method, arguments: self._group.call_workers(
                method, arguments, deadline.remaining_s
            ),
            self._group.ranks_on_node,
            self._config,
            lambda stage: None,
            self._compile if self._config.step_transport == "compiled-graph" else lambda: None,
        )

    def _compile(self) -> None:
        from ray.dag import InputNode, MultiOutputNode

        from tpinference_engine.transport.compiled_graph import set_channel_bytes

        output_bytes = self._limits.max_output_bytes
        self._group.call(
            lambda actor, _: actor.prepare_graph.remote(output_bytes), None, "prepare_graph"
        )
        set_channel_bytes(self._limits.max_input_bytes)
        with InputNode() as message:
            graph = MultiOutputNode([actor.step.bind(message) for actor in self._group.actors])
        # Ranks are killed first on purpose, and Ray tells of each of them at length.
        logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)
        self._graph = graph.experimental_compile(
            _max_inflight_executions=self._in_flight + 1,
            _overlap_gpu_communication=False,
            enable_asyncio=False,
        )

    @property
    def places(self) -> tuple[RankPlace, ...]:
        return self._group.places

    def submit(self, step: StepInput) -> None:
        payload = encode_input(step)
        if self._graph is not None:
            refs = self._graph.execute(payload)
        else:
            refs = [actor.step.remote(payload) for actor in self._group.actors]
        self._calls.append((step, refs))

    def collect(self) -> StepOutput:
        step, refs = self._calls.popleft()
        timeout_s = self._config.step_timeout_s
        if self._graph is not None:
            answers = [ref.get(timeout=timeout_s) for ref in refs]
        else:
            from tpinference_engine.transport.ray_gather import gather

            answers = gather(refs, timeout_s, "a step")
        return reconcile_outputs(step, [decode_output(answer) for answer in answers])

    def shutdown(self) -> None:
        self._group.kill()
        if self._graph is not None:
            self._graph.teardown()
        self._group.release()
        self._cluster.leave()


class ThreadRanks:
    """All ranks in this process, a thread each: in-process steps where there is more than one."""

    def __init__(self, config: EngineConfig, factory: RunnerFactory) -> None:
        size = config.tensor_parallel_size
        self._workers = [Worker(config, factory, device_index=rank) for rank in range(size)]
        self._threads = ThreadPoolExecutor(size)
        self._calls: deque[tuple[StepInput, list[bytes]]] = deque()
        self.places = read_places(self._call, size)
        bring_up(self._call, [size] * size, config, lambda stage: None)

    def submit(self, step: StepInput) -> None:
        payload = encode_input(step)
        answers = self._threads.map(lambda worker: worker.step(payload), self._workers)
        self._calls.append((step, list(answers)))

    def collect(self) -> StepOutput:
        step, answers = self._calls.popleft()
        return reconcile_outputs(step, [decode_output(answer) for answer in answers])

    def shutdown(self) -> None:
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    def _call(self, method: str, arguments: Sequence[Arguments]) -> list[Any]:
        calls = [
            self._threads.submit(getattr(worker, method), *given)
            for worker, given in zip(self._workers, arguments, strict=False)
        ]
        return [call.result() for call in calls]
