"""The product's executor: ranks are Ray actors, steps go through a transport of Ray's.

One thread calls it, for its whole life. What an error means for the group is in `rank_group.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import TPInferenceError, cause_for
from tpinference_engine.executor.base import BeginStage, RankPlace
from tpinference_engine.executor.bring_up import (
    bring_up,
    check_rpc_method,
    rpc_failure,
    startup_deadline,
)
from tpinference_engine.executor.deadline import Deadline
from tpinference_engine.executor.rank_group import RankGroup
from tpinference_engine.executor.ray_cluster import RayCluster
from tpinference_engine.executor.semaphores import (
    graph_semaphores,
    sweep_dead_semaphores,
    unlink_semaphores,
)
from tpinference_engine.executor.step_in_flight import StepInFlight
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.step import StepInput, StepOutput
from tpinference_engine.transport.actor_call import ActorCallTransport
from tpinference_engine.transport.base import StepTransport
from tpinference_engine.transport.compiled_graph import CompiledGraphTransport


class RayExecutor:
    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        runner_factory: RunnerFactory | None = None,
    ) -> None:
        """`max_model_len` sizes the channels. `runner_factory` None = the model."""
        self._config = config
        self._limits = config.step_limits(max_model_len)
        self._runner_factory = runner_factory
        self._cluster = RayCluster(config.ray_address, config.tensor_parallel_size)
        self._group = RankGroup(config, self._cluster)
        self._transport: StepTransport | None = None
        self._in_flight = StepInFlight(self._limits)
        self._graph_names_linked = False
        self._names_before: frozenset[str] = frozenset()
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
                lambda: self._connect_steps(deadline),
            )

    @property
    def places(self) -> tuple[RankPlace, ...]:
        return self._group.places

    def submit(self, step: StepInput) -> None:
        self._group.check_alive()
        assert self._transport is not None, "start has returned"
        payload = self._in_flight.pack(step)
        try:
            self._transport.submit(payload)
        except TPInferenceError as error:
            failure = self._group.fail(error)
            raise failure from cause_for(failure, error)

    def collect(self) -> StepOutput:
        assert self._transport is not None and self._in_flight, "submit came before"
        try:
            output = self._in_flight.unpack(self._transport.result(self._config.step_timeout_s))
        except TPInferenceError as error:
            failure = self._group.fail(error)
            raise failure from cause_for(failure, error)
        if self._graph_names_linked:
            self._unlink_graph_names()
        return output

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
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self._group.release()
        self._cluster.leave()
        sweep_dead_semaphores()

    def _connect_steps(self, deadline: Deadline) -> None:
        if self._config.step_transport == "actor-call":
            self._transport = ActorCallTransport(self._group.actors)
            return
        sweep_dead_semaphores()
        self._names_before = self._own_graph_names()
        output_bytes = self._limits.max_output_bytes
        self._group.call(
            lambda actor, _: actor.prepare_graph.remote(output_bytes),
            deadline.remaining_s,
            "prepare_graph",
        )
        try:
            self._transport = CompiledGraphTransport(
                self._group.actors, max_input_bytes=self._limits.max_input_bytes
            )
        except TPInferenceError as error:
            failure = self._group.fail(error)
            raise failure from cause_for(failure, error)
        self._group.watch_tasks(self._transport.watched_refs())
        self._graph_names_linked = True

    def _unlink_graph_names(self) -> None:
        """After the first step every process has the semaphores open; their names serve nobody."""
        self._graph_names_linked = False
        self._group.call(
            lambda actor, _: actor.unlink_graph_semaphores.remote(),
            self._config.step_timeout_s,
            "unlink_graph_semaphores",
        )
        unlink_semaphores(self._own_graph_names() - self._names_before)

    def _own_graph_names(self) -> frozenset[str]:
        raylet = self._cluster.raylet_pid()
        return frozenset() if raylet is None else graph_semaphores(raylet)
