"""The product's executor: ranks are Ray actors, steps go through a transport of Ray's.

One thread calls it, for its whole life. What an error means for the group is in `rank_group.py`,
which transport a step takes in `step_path.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tpinference_engine.config import EngineConfig, Transport
from tpinference_engine.errors import TPInferenceError, cause_for
from tpinference_engine.executor.base import BeginStage, RankPlace
from tpinference_engine.executor.bring_up import (
    bring_up,
    check_rpc_method,
    rpc_failure,
    startup_deadline,
)
from tpinference_engine.executor.rank_group import RankGroup
from tpinference_engine.executor.ray_cluster import RayCluster
from tpinference_engine.executor.semaphores import sweep_dead_semaphores
from tpinference_engine.executor.step_in_flight import StepInFlight
from tpinference_engine.executor.step_path import StepPath
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.step import StepInput, StepOutput


class RayExecutor:
    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        runner_factory: RunnerFactory | None = None,
    ) -> None:
        """`max_model_len` sizes the channels. `runner_factory` None = the model."""
        self._config = config
        limits = config.step_limits(max_model_len)
        self._runner_factory = runner_factory
        self._cluster = RayCluster(config.ray_address, config.tensor_parallel_size)
        self._group = RankGroup(config, self._cluster)
        self._path = StepPath(config, limits, self._cluster, self._group)
        self._in_flight = StepInFlight(limits)
        self.num_blocks = 0

    def start(self, begin_stage: BeginStage) -> None:
        with startup_deadline(self._config) as deadline:
            begin_stage("rayJoined")
            self._cluster.join(deadline)
            self._group.place(self._runner_factory, deadline)
            self.num_blocks = bring_up(
                lambda method, arguments: self._group.call_workers(
                    method, arguments, deadline.remaining_s
                ),
                self._group.ranks_on_node,
                self._config,
                begin_stage,
                lambda: self._path.connect(deadline.remaining_s),
            )

    @property
    def places(self) -> tuple[RankPlace, ...]:
        return self._group.places

    @property
    def step_transport(self) -> Transport:
        return self._path.transport

    def submit(self, step: StepInput) -> None:
        self._group.check_alive()
        self._path.submit(self._in_flight.pack(step))

    def collect(self) -> StepOutput:
        assert self._in_flight, "submit came before"
        answers = self._path.result()
        try:
            return self._in_flight.unpack(answers)
        except TPInferenceError as error:
            failure = self._group.fail(error)
            raise failure from cause_for(failure, error)

    def rest(self) -> None:
        self._group.check_alive()
        self._path.rest()

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        assert not self._in_flight, "an RPC is fenced: no step is in flight"
        check_rpc_method(method)
        return self._group.call_workers(
            method,
            [tuple(args)] * self._config.tensor_parallel_size,
            timeout_s,
            partial(rpc_failure, method),
        )

    def check_alive(self) -> None:
        self._group.check_alive()

    def shutdown(self) -> None:
        # Killed first: tearing a graph down waits for ranks that may never return.
        self._group.kill()
        self._path.close()
        self._group.release()
        self._cluster.leave()
        sweep_dead_semaphores()
