"""Which transport a step takes: the compiled graph while there is work, plain calls after a rest.

Whoever waits on a compiled graph spins, so an idle engine rests: on one raylet its ranks park in
the graph, across raylets the graph is torn down. After a rest steps go by plain calls, so that the
first token waits for nothing and a canary wakes nobody; lasting work brings the graph back. A
change of transport needs no fence: no call is in flight between two steps, and a rank queues what
it is told in the order in which it is told.

One thread calls it. It does not know what is in a step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tpinference_engine.config import EngineConfig, Transport
from tpinference_engine.errors import StepTimedOut, TPInferenceError, cause_for
from tpinference_engine.executor.rank_group import RankGroup
from tpinference_engine.executor.ray_cluster import RayCluster
from tpinference_engine.executor.semaphores import (
    graph_semaphores,
    sweep_dead_semaphores,
    unlink_semaphores,
)
from tpinference_engine.step import StepLimits
from tpinference_engine.transport.actor_call import ActorCallTransport
from tpinference_engine.transport.base import StepTransport
from tpinference_engine.transport.compiled_graph import CompiledGraphTransport

UNPARK_AFTER_STEPS = 8
"""More than a canary takes. Waking parked ranks costs about 3 ms."""
RECOMPILE_AFTER_STEPS = 512
"""A compile stops the engine for about half a second, and saves well under a millisecond a step."""
MAX_GRAPHS = 100
"""Ray never gives back all of a graph that went across raylets. After the last of these it is plain
calls for good, which cost no more threads."""

logger = logging.getLogger(__name__)


class StepPath:
    def __init__(
        self, config: EngineConfig, limits: StepLimits, cluster: RayCluster, group: RankGroup
    ) -> None:
        self._config = config
        self._limits = limits
        self._cluster = cluster
        self._group = group
        self._calls = ActorCallTransport(())
        self._graph: CompiledGraphTransport | None = None
        self._in_use: StepTransport = self._calls
        self._steps_since_rest = 0
        self._num_graphs = 0
        self._names_before: frozenset[str] | None = None
        """Semaphores that were there before the graph, until its first step."""

    @property
    def transport(self) -> Transport:
        """Of the next step."""
        return "compiled-graph" if self._in_use is self._graph else "actor-call"

    def connect(self, timeout_s: float) -> None:
        """After the group has been placed."""
        self._in_use = self._calls = ActorCallTransport(self._group.actors)
        if self._config.step_transport == "compiled-graph":
            self._compile(timeout_s)

    def submit(self, payload: bytes) -> None:
        with self._ending_group():
            if self._has_earned_graph():
                self._resume()
            self._steps_since_rest += 1
            self._in_use.submit(payload)

    def result(self) -> list[bytes]:
        with self._ending_group():
            answers = self._in_use.result(self._config.step_timeout_s)
        if self._in_use is self._graph and self._names_before is not None:
            self._unlink_names(self._names_before)
        return answers

    def rest(self) -> None:
        """Nothing is in flight, and nothing is to come soon. Idempotent."""
        self._steps_since_rest = 0
        if self._graph is None or self._in_use is not self._graph:
            return
        self._in_use = self._calls
        with self._ending_group():
            if self._group.shares_raylet:
                self._graph.park()
            else:
                self._drop_healthy_graph()

    def close(self) -> None:
        """The ranks have been killed: a teardown waits for ranks that may never return."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.close()
        self._in_use = self._calls = ActorCallTransport(())

    def _has_earned_graph(self) -> bool:
        if self._graph is not None:
            is_resting = self._in_use is not self._graph
            return is_resting and self._steps_since_rest >= UNPARK_AFTER_STEPS
        may_compile = 0 < self._num_graphs < MAX_GRAPHS
        return may_compile and self._steps_since_rest >= RECOMPILE_AFTER_STEPS

    def _resume(self) -> None:
        if self._graph is None:
            self._compile(self._config.step_timeout_s)
        else:
            self._graph.unpark(self._config.step_timeout_s)
            self._in_use = self._graph

    def _compile(self, timeout_s: float) -> None:
        sweep_dead_semaphores()
        names_before = self._own_names()
        output_bytes = self._limits.max_output_bytes
        self._group.call(
            lambda actor, _: actor.prepare_graph.remote(output_bytes), timeout_s, "prepare_graph"
        )
        with self._ending_group():
            graph = CompiledGraphTransport(
                self._group.actors, max_input_bytes=self._limits.max_input_bytes
            )
        self._group.watch_tasks(graph.watched_refs())
        self._in_use = self._graph = graph
        self._names_before = names_before
        self._num_graphs += 1
        if self._num_graphs == MAX_GRAPHS:
            logger.warning("%d graphs were compiled, this is the last one", MAX_GRAPHS)

    def _drop_healthy_graph(self) -> None:
        """A rank that hangs just now would keep a teardown for good, so it is killed in time."""
        graph, self._graph = self._graph, None
        assert graph is not None, "the caller has seen it"
        self._names_before = None  # A clean end takes its names along.
        self._group.watch_tasks(())
        limit_s = self._config.step_timeout_s
        late = StepTimedOut(f"tearing down the graph did not end in {limit_s:g} s")
        watchdog = threading.Timer(limit_s, self._group.fail, (late,))
        watchdog.start()
        try:
            graph.close()
        finally:
            watchdog.cancel()
        self._group.check_alive()

    @contextmanager
    def _ending_group(self) -> Iterator[None]:
        """What a transport raises has lost the group."""
        try:
            yield
        except TPInferenceError as error:
            failure = self._group.fail(error)
            raise failure from cause_for(failure, error)

    def _unlink_names(self, names_before: frozenset[str]) -> None:
        """After the first step every process has the semaphores open; their names serve nobody."""
        self._names_before = None
        self._group.call(
            lambda actor, _: actor.unlink_graph_semaphores.remote(),
            self._config.step_timeout_s,
            "unlink_graph_semaphores",
        )
        unlink_semaphores(self._own_names() - names_before)

    def _own_names(self) -> frozenset[str]:
        raylet = self._cluster.raylet_pid()
        return frozenset() if raylet is None else graph_semaphores(raylet)
