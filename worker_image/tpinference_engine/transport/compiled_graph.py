"""The product's transport: one Ray compiled graph over all ranks.

A message is one `bytes` (Ray's fast path) into shared memory, read by every rank's own graph
thread. Facts this module lives by, each measured with Ray 2.60:
- buffers come from the DAG context of the process that makes a channel (input: here, outputs: on
  the ranks); the argument of `experimental_compile` is ignored for them;
- a `get` that timed out has burnt its ref, so there is one long get a step;
- reading one output reads them all, so a step is as fast as its slowest rank;
- the first error of any rank is given out as every rank's, so where it was met says nothing;
- a dropped unread ref blocks in its finaliser until the graph is torn down, so refs are kept;
- tearing down while a rank hangs never returns: whoever owns the ranks kills them first;
- who waits for a message spins: a rank three quarters of a core, the driver a third. On one raylet
  a rank that is busy with a PARK costs nothing; across raylets Ray's own threads still spin for it,
  and only a teardown ends that;
- each compile across raylets leaves 3 threads in the driver, 2 and about 2 MiB in a rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ray.dag import DAGContext, InputNode, MultiOutputNode
from ray.experimental.channel import ChannelContext

from tpinference_engine.errors import GroupFailed
from tpinference_engine.transport.base import PARK
from tpinference_engine.transport.ray_failure import translate_ray_failure
from tpinference_engine.transport.ray_gather import gather

MAX_IN_FLIGHT = 2
"""One more than is used: Ray refuses a call at its cap instead of queueing it."""

_SERIALIZED_EXTRA_BYTES = 4096
_RAY_GRAPH_LOGGER = "ray.dag.compiled_dag_node"


def set_channel_bytes(message_bytes: int) -> None:
    """Channels that this process makes from now on hold a message of `message_bytes`.

    What RAY_CGRAPH_buffer_size_bytes asks for is a floor: a channel too small would be replaced at
    the first large message, and Ray never frees the old one.
    """
    context = DAGContext.get_current()
    needed = message_bytes + _SERIALIZED_EXTRA_BYTES
    context.buffer_size_bytes = max(context.buffer_size_bytes, needed)


def set_graph_device(device: str) -> None:
    """The graph's thread of this rank selects `device`.

    Ray would look it up in CUDA_VISIBLE_DEVICES, which nobody sets here, and fail the first step.
    """
    import torch

    ChannelContext.get_current().set_torch_device(torch.device(device))


class CompiledGraphTransport:
    def __init__(self, actors: Sequence[Any], *, max_input_bytes: int) -> None:
        """Compiles. `actors` are in rank order; their own channels must have been sized before.

        Raises GroupFailed.
        """
        self._actors = tuple(actors)
        set_channel_bytes(max_input_bytes)
        with InputNode() as message:
            graph = MultiOutputNode([actor.step.bind(message) for actor in actors])
        try:
            self._graph = graph.experimental_compile(
                _max_inflight_executions=MAX_IN_FLIGHT,
                _overlap_gpu_communication=False,
                enable_asyncio=False,
            )
        except Exception as error:
            rank = self._rank_of(error)
            raise translate_ray_failure(error, rank, "compiling the graph") from error
        # Ray's monitor logs a traceback for each rank that it finds dead, though ranks are killed
        # first on purpose; what matters comes as an exception.
        logging.getLogger(_RAY_GRAPH_LOGGER).setLevel(logging.CRITICAL)
        self._refs: list[Any] = []

    def submit(self, payload: bytes) -> None:
        try:
            self._refs = self._graph.execute(payload)
        except Exception as error:
            raise translate_ray_failure(error, self._rank_of(error), "sending a step") from error

    def result(self, timeout_s: float) -> list[bytes]:
        if not self._refs:
            raise GroupFailed("no step is in flight")
        try:
            answers = [ref.get(timeout=timeout_s) for ref in self._refs]
        except Exception as error:
            raise translate_ray_failure(error, self._rank_of(error), "a step") from error
        self._refs = []
        return answers

    def park(self) -> None:
        """Ranks stop spinning until `unpark`; their plain calls are answered meanwhile."""
        self.submit(PARK)

    def unpark(self, timeout_s: float) -> None:
        gather([actor.unpark.remote() for actor in self._actors], timeout_s, "waking")
        self.result(timeout_s)

    def watched_refs(self) -> list[Any]:
        return [self._graph.worker_task_refs[actor] for actor in self._actors]

    def close(self) -> None:
        self._graph.teardown()
        self._refs = []

    def _rank_of(self, error: Exception) -> int | None:
        """Whose death Ray reports: it may come up on the output of any other rank."""
        dead = getattr(error, "actor_id", None)
        ids = [actor._actor_id.hex() for actor in self._actors]
        return ids.index(dead) if dead in ids else None
