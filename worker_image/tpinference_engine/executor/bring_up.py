"""From placed ranks to ranks that take steps: the same calls in the same order on every backend.

It does not know how a call reaches a rank, nor how ranks were placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import (
    GroupFailed,
    InvalidConfig,
    StartupTimedOut,
    StepTimedOut,
    TPInferenceError,
)
from tpinference_engine.executor.base import BeginStage, RankPlace
from tpinference_engine.executor.deadline import Deadline
from tpinference_engine.worker import Worker

Arguments = tuple[Any, ...]
CallRanks = Callable[[str, Sequence[Arguments]], list[Any]]
"""Calls a method of the first ranks' workers, one for each given tuple of arguments."""
AsFailure = Callable[[TPInferenceError], TPInferenceError]
"""What an error of one rank is for the group."""


def as_it_is(error: TPInferenceError) -> TPInferenceError:
    return error


@contextmanager
def startup_deadline(config: EngineConfig) -> Iterator[Deadline]:
    """Whatever is not answered by then has made the start too slow, and is named for it."""
    limit_s = config.startup_timeout_s
    try:
        yield Deadline.after(limit_s)
    except StepTimedOut as error:
        raise StartupTimedOut(
            f"start-up took longer than startup_timeout_s {limit_s:g}: {error}"
        ) from error


def read_places(call: CallRanks, num_ranks: int) -> tuple[RankPlace, ...]:
    """Of ranks that are numbered before they are asked, as all are without Ray."""
    return tuple(
        RankPlace(rank, str(p["pod"]), str(p["node"]), str(p["device"]), int(p["pid"]))
        for rank, p in enumerate(call("place", [()] * num_ranks))
    )


def bring_up(
    call: CallRanks,
    ranks_on_node: Sequence[int],
    config: EngineConfig,
    begin_stage: BeginStage,
    compile_graph: Callable[[], None] | None = None,
) -> int:
    """Blocks of the cache that every rank has. `ranks_on_node[rank]` ranks share its node.

    `compile_graph` None = the backend has no stage of that.
    """
    everybody: list[Arguments] = [()] * len(ranks_on_node)
    begin_stage("weightsLoaded")
    call("initialize", _membership(call, ranks_on_node, config.epoch))
    call("load_model", everybody)
    num_blocks = config.num_gpu_blocks_override or min(call("cache_capacity", everybody))
    call("allocate_cache", [(num_blocks,)] * len(everybody))
    if compile_graph is not None:
        begin_stage("graphCompiled")
        compile_graph()
    begin_stage("warmedUp")
    call("warm_up", everybody)
    if config.distributed_executor_backend != "uni":
        call("settle", everybody)  # Else the rank's process is the engine core's.
    return num_blocks


def _membership(call: CallRanks, ranks_on_node: Sequence[int], epoch: int) -> list[Arguments]:
    store = None
    if len(ranks_on_node) > 1:
        # On a free port of rank 0, which keeps it: nobody can take the port between.
        ((host, port),) = call("open_store", [()])
        store = host, port
    return [(rank, epoch, store, peers) for rank, peers in enumerate(ranks_on_node)]


def check_rpc_method(method: str) -> None:
    """Before it is sent: a misspelt name would be an error of every rank, and end the group.

    Raises InvalidConfig.
    """
    if method.startswith("_") or not callable(getattr(Worker, method, None)):
        raise InvalidConfig(f"method is {method!r}, must be a public method of the worker")


def rpc_failure(method: str, error: TPInferenceError) -> GroupFailed:
    """A rank that failed in a call is out of step with its peers, whatever it failed for."""
    if isinstance(error, GroupFailed):
        return error
    return GroupFailed(f"{method} failed on a rank: {type(error).__name__}: {error}")
