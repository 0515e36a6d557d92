"""The actors of one incarnation: placed, put in rank order, watched, called, killed together.

A group that failed stays failed: any error of one rank ends all, because the others may wait for it
in a collective, for good. It does not know what its workers are called for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import (
    GroupFailed,
    RankDied,
    RanksNotPlaced,
    StepTimedOut,
    TPInferenceError,
    cause_for,
)
from tpinference_engine.executor.base import RankPlace
from tpinference_engine.executor.bring_up import Arguments, AsFailure, as_it_is
from tpinference_engine.executor.deadline import Deadline
from tpinference_engine.executor.placement import (
    Layout,
    PlacedActor,
    choose_layout,
    describe_shortage,
    find_misplacement,
    observe_nodes,
    order_ranks,
    ranks_on_node,
)
from tpinference_engine.executor.rank_actor import RankActor
from tpinference_engine.executor.rank_watch import RankWatch
from tpinference_engine.executor.ray_cluster import RayCluster
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.transport.ray_failure import describe_death
from tpinference_engine.transport.ray_gather import gather

_NODE_POLL_S = 0.2
_NAMING_S = 1.0
"""How long an error that names no rank waits for the watch to find the dead one."""
_DESCRIBE_S = 0.3
_END_S = 5.0

logger = logging.getLogger(__name__)


class RankGroup:
    def __init__(self, config: EngineConfig, cluster: RayCluster) -> None:
        self._config = config
        self._cluster = cluster
        self._placement: Any = None
        self._watch: RankWatch | None = None
        self._lock = threading.Lock()
        self._killed = False
        self._failure: TPInferenceError | None = None
        self._failed = threading.Event()
        self._described = threading.Event()
        self.actors: tuple[Any, ...] = ()
        """In rank order once placed."""
        self.places: tuple[RankPlace, ...] = ()
        self.ranks_on_node: tuple[int, ...] = ()
        """For each rank, how many ranks its node holds."""
        self.shares_raylet = False
        """Whether all ranks are on the driver's own raylet."""

    def place(self, runner_factory: RunnerFactory | None, deadline: Deadline) -> None:
        layout = self._wait_for_nodes(deadline)
        self._reserve(layout, deadline)
        self.actors = tuple(
            self._create_actor(index, index // layout.ranks_per_node, layout, runner_factory)
            for index in range(self._config.tensor_parallel_size)
        )
        placed: list[PlacedActor] = self.call(
            lambda actor, _: actor.place.remote(), deadline.remaining_s, "placing"
        )
        self._put_in_order(placed, layout)
        self._join(deadline)

    def call(
        self, start_call: Callable[[Any, int], Any], timeout_s: float | None, doing: str
    ) -> list[Any]:
        """`start_call(actor, rank)` for all, then all answers in rank order."""
        self.check_alive()
        refs = [start_call(actor, rank) for rank, actor in enumerate(self.actors)]
        return self._gather(refs, timeout_s, doing, as_it_is)

    def call_workers(
        self,
        method: str,
        arguments: Sequence[Arguments],
        timeout_s: float | None,
        as_failure: AsFailure = as_it_is,
    ) -> list[Any]:
        """`method` of the first ranks' workers, one for each of `arguments`."""
        self.check_alive()
        called = zip(self.actors, arguments, strict=False)
        refs = [actor.call.remote(method, given) for actor, given in called]
        return self._gather(refs, timeout_s, method, as_failure)

    def watch_tasks(self, refs: Sequence[Any]) -> None:
        if self._watch is not None:
            self._watch.watch_tasks(refs)

    def check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def fail(self, error: TPInferenceError) -> TPInferenceError:
        """Kills all ranks. The first cause that is known, which may be older than `error`."""
        nameless = isinstance(error, GroupFailed) and error.rank is None
        if isinstance(error, RankDied) or (nameless and not isinstance(error, StepTimedOut)):
            if self._failed.wait(_NAMING_S):
                self._described.wait(2 * _DESCRIBE_S)
        if nameless and isinstance(error, StepTimedOut):
            error = self._name_silent(error)
        self._record(error)
        self._described.set()
        self.kill()
        assert self._failure is not None, "just recorded"
        return self._failure

    def kill(self) -> None:
        """The only sure way to end a collective. Idempotent, from any thread."""
        with self._lock:
            if self._killed:
                return
            self._killed = True
        for actor in self.actors:
            ray.kill(actor, no_restart=True)

    def release(self) -> None:
        """After `kill`: returns when the processes are gone and the reservation is given back."""
        if self._watch is not None:
            if not self._watch.wait_until_all_ended(_END_S):
                logger.warning("a rank still runs %s s after it was killed", _END_S)
            self._watch.stop()
            self._watch = None
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    def _name_silent(self, error: StepTimedOut) -> StepTimedOut:
        """A rank that hangs in a graph's step still answers plain calls, a frozen one does not.

        Who waits in a collective and who keeps the others waiting look alike from here.
        """
        refs = [actor.place.remote() for actor in self.actors]
        _, late = ray.wait(refs, num_returns=len(refs), timeout=_NAMING_S)
        silent = [rank for rank, ref in enumerate(refs) if ref in late]
        told = f"no answer to a call of ranks {silent}" if silent else "every rank answers calls"
        rank = silent[0] if len(silent) == 1 else None
        return StepTimedOut(f"{error}; {told}", rank=rank)

    def _gather(
        self, refs: Sequence[Any], timeout_s: float | None, doing: str, as_failure: AsFailure
    ) -> list[Any]:
        try:
            return list(gather(refs, timeout_s, doing))
        except TPInferenceError as error:
            failure = self.fail(as_failure(error))
            raise failure from cause_for(failure, error)

    def _wait_for_nodes(self, deadline: Deadline) -> Layout:
        config = self._config
        num_ranks, per_node = config.tensor_parallel_size, config.ranks_per_node
        pause = threading.Event()
        while True:
            nodes = observe_nodes(self._cluster.node_table(), config.device)
            layout = choose_layout(nodes, num_ranks, per_node, config.device)
            if layout is not None:
                return layout
            if deadline.passed:
                raise RanksNotPlaced(describe_shortage(nodes, num_ranks, per_node, config.device))
            pause.wait(_NODE_POLL_S)

    def _reserve(self, layout: Layout, deadline: Deadline) -> None:
        self._placement = placement_group(
            layout.bundles,
            strategy=layout.strategy,
            name=f"tpinference-{self._config.engine_id}-epoch{self._config.epoch}",
        )
        if not self._placement.wait(timeout_seconds=deadline.remaining_s):
            raise RanksNotPlaced(
                f"Ray could not reserve {layout.num_nodes} times {layout.bundles[0]}: "
                "the nodes have it, but something else uses it"
            )

    def _create_actor(
        self, index: int, bundle: int, layout: Layout, runner_factory: RunnerFactory | None
    ) -> Any:
        config = self._config
        gpus, cpus = (layout.amount, 0.0) if layout.resource == "GPU" else (0.0, layout.amount)
        options = {
            "name": f"tpinference-{config.engine_id}-epoch{config.epoch}-{index}",
            "num_gpus": gpus,
            "num_cpus": cpus,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._placement, placement_group_bundle_index=bundle
            ),
        }
        return ray.remote(RankActor).options(**options).remote(config, runner_factory)

    def _put_in_order(self, placed: Sequence[PlacedActor], layout: Layout) -> None:
        misplaced = find_misplacement(placed, layout)
        if misplaced:
            raise self.fail(RanksNotPlaced(misplaced))
        driver_node = self._cluster.node_id()
        self.shares_raylet = all(actor.node_id == driver_node for actor in placed)
        order = order_ranks(placed, driver_node)
        in_order = [placed[index] for index in order]
        self.actors = tuple(self.actors[index] for index in order)
        self.places = tuple(
            RankPlace(rank, actor.pod, actor.node, actor.device, actor.pid)
            for rank, actor in enumerate(in_order)
        )
        self.ranks_on_node = tuple(ranks_on_node(in_order))

    def _join(self, deadline: Deadline) -> None:
        num_ranks = len(self.actors)
        host = self._cluster.node_address()
        self._watch = RankWatch(host, num_ranks, self._on_rank_end, self._on_watch_blind)
        lifeline = self._watch.address
        self.call(
            lambda actor, rank: actor.join.remote(rank, lifeline), deadline.remaining_s, "joining"
        )

    def _on_rank_end(self, rank: int) -> None:
        """On the watch's thread, while the engine's own thread may be deep in a wait."""
        if self._killed or self._failure is not None:
            return
        # Named first and described second: the engine's own thread waits for a name, not for long.
        death = self._death(rank, "its connection ended")
        self._record(death)
        self._describe(death, self._death(rank, self._describe_end(rank)))
        self.kill()

    def _on_watch_blind(self, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"
        self._record(GroupFailed(f"the ranks can't be watched any more: {what}"))
        self._described.set()
        self.kill()

    def _death(self, rank: int, detail: str) -> RankDied:
        place = self.places[rank]
        where = f"pod {place.pod}, node {place.node}, pid {place.pid}"
        return RankDied(f"rank {rank} ({where}) died: {detail}", rank=rank)

    def _describe_end(self, rank: int) -> str:
        try:
            ray.get(self.actors[rank].place.remote(), timeout=_DESCRIBE_S)
        except ray.exceptions.RayError as error:
            if not isinstance(error, ray.exceptions.GetTimeoutError):
                return describe_death(error)
        return "its connection ended"

    def _record(self, failure: TPInferenceError) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = failure
                logger.error("rank group of epoch %s failed: %s", self._config.epoch, failure)
        self._failed.set()

    def _describe(self, named: RankDied, described: RankDied) -> None:
        with self._lock:
            if self._failure is named:
                self._failure = described
                logger.error("%s", described)
        self._described.set()
