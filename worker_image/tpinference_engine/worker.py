"""One rank: what every backend calls, directly or through an actor.

The same class runs under ray, multiprocessing and in-process. It knows the step message and its
order; what the step computes is the runner's, how the message travels is the transport's. Importing
it costs no torch: the runner is made in the rank's own process.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import (
    GroupFailed,
    InvalidConfig,
    MessageCorrupt,
    TPInferenceError,
    cause_for,
)
from tpinference_engine.runner.base import RankSetup, Runner, RunnerFactory
from tpinference_engine.runner.cores import threads_of_rank, usable_cores
from tpinference_engine.step import (
    NO_STEP,
    SampledToken,
    StepInput,
    StepOutput,
    decode_input,
    encode_output,
    next_step_id,
    previous_step_id,
    token_crc,
)

LOOPBACK = "127.0.0.1"
SWITCH_INTERVAL_S = 0.0005
"""The thread of the steps gets the interpreter back from any other this soon."""
_PEER_LOSS_CLASS = "DistError"
"""torch.distributed's base of what NCCL and the store raise."""
_PEER_LOSS_TEXT = "gloo/"
"""gloo raises plain RuntimeErrors, which begin with the place in its source."""


@dataclass(frozen=True, slots=True)
class _NodePlace:
    node: str
    address: str
    device_index: int


class Worker:
    """Methods come one at a time, from any thread; each raises TPInferenceError.

    Order: place, open_store (rank 0), initialize, load_model, cache_capacity, allocate_cache,
    warm_up, settle in a process of its own, then steps; idle before any other call between steps;
    close.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner_factory: RunnerFactory | None = None,
        *,
        device_index: int = 0,
    ) -> None:
        """`runner_factory` None = the model. `device_index` is for backends that deal devices
        themselves; under ray the device is the one that Ray gave the actor."""
        self._config = config
        self._runner = (runner_factory or _model_runner)(config)
        self._device_index = device_index
        self._rank: int | None = None
        self._epoch = config.epoch
        self._last_step: int | None = None

    def place(self) -> dict[str, str | int]:
        """Where this rank runs; `address` is what its peers reach it at."""
        found = self._find_node()
        return {
            "pod": socket.gethostname(),
            "node": found.node,
            "address": found.address,
            "device": f"cuda:{found.device_index}" if self._config.device == "cuda" else "cpu",
            "pid": os.getpid(),
        }

    def open_store(self) -> tuple[str, int]:
        """Rank 0: host and port of a store that stays open, for everybody's `initialize`."""
        return self._runner.open_store(self._find_node().address)

    def initialize(
        self,
        rank: int,
        epoch: int,
        store: tuple[str, int] | None = None,
        ranks_on_node: int = 1,
    ) -> None:
        """Joins the group of `epoch`. `ranks_on_node` share this pod's cores."""
        if not 0 <= rank < self._config.tensor_parallel_size:
            raise InvalidConfig(
                f"rank is {rank!r}, tensor_parallel_size {self._config.tensor_parallel_size} "
                f"allows 0 to {self._config.tensor_parallel_size - 1}"
            )
        self._rank, self._epoch, self._last_step = rank, epoch, None
        found = self._find_node()
        self._runner.initialize(
            RankSetup(
                rank=rank,
                store=store,
                address=found.address,
                device_index=found.device_index,
                num_threads=threads_of_rank(ranks_on_node, usable_cores()),
            )
        )

    def load_model(self) -> int:
        """Bytes of this rank's slice of the weights."""
        return self._runner.load_model()

    def cache_capacity(self) -> int:
        """Blocks that fit here. The group uses the smallest of its ranks' answers."""
        return self._runner.cache_capacity()

    def allocate_cache(self, num_blocks: int) -> None:
        self._runner.allocate_cache(num_blocks)

    def warm_up(self) -> None:
        self._runner.warm_up()

    def step(self, payload: bytes) -> bytes:
        """The graph method: queues all of call N, waits for its sample only, acknowledges.

        Transports lose which rank it was that raised, so the error says it: see `rank_error`.
        """
        with self.naming_errors():
            return self._take_step(payload)

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            named = self.rank_error(error)
            raise named from cause_for(named, error)

    def rank_error(self, error: Exception) -> TPInferenceError:
        """`error` with this rank's name, unless it is the loss of a peer.

        Who sees a peer's end is a survivor, and does not know whose end it was.
        """
        lost = _is_peer_loss(error)
        if isinstance(error, GroupFailed):
            error.rank = None if lost else self._rank
        if isinstance(error, TPInferenceError):
            return error
        name = "a rank" if self._rank is None else f"rank {self._rank}"
        what = "lost a peer" if lost else f"failed: {type(error).__name__}"
        return GroupFailed(f"{name} {what}: {error}", rank=None if lost else self._rank)

    def idle(self) -> None:
        """The fence: returns when nothing is queued on the device any more."""
        self._runner.idle()

    def settle(self) -> None:
        """Start-up's objects stay; the collector need not look at them in every step."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        self._runner.close()

    def _take_step(self, payload: bytes) -> bytes:
        step = decode_input(payload)
        self._check_turn(step)
        # Before it is queued: a step that failed half-way can't be sent again.
        self._last_step = step.step_id
        work = self._runner.enqueue(step)
        queued = time.perf_counter()
        tokens = work.wait()
        skew_us = min(int((time.perf_counter() - queued) * 1e6), np.iinfo(np.int32).max)
        return encode_output(self._acknowledge(step, tokens, skew_us))

    def _check_turn(self, step: StepInput) -> None:
        if self._rank is None:
            raise MessageCorrupt(f"step {step.step_id} came before the rank was initialized")
        if step.epoch != self._epoch:
            raise MessageCorrupt(
                f"step {step.step_id} is of epoch {step.epoch}, this rank of {self._epoch}",
                rank=self._rank,
            )
        if self._last_step is not None and step.step_id != next_step_id(self._last_step):
            raise MessageCorrupt(
                f"step {step.step_id} follows step {self._last_step}, must be its successor",
                rank=self._rank,
            )

    def _acknowledge(self, step: StepInput, tokens: list[int], skew_us: int) -> StepOutput:
        assert self._rank is not None, "_check_turn has passed"
        sampled: tuple[SampledToken, ...] = ()
        if self._rank == 0:
            sampled = tuple(
                SampledToken(row.slot, row.generation, row.position, token)
                for row, token in zip(step.sample, tokens, strict=True)
            )
        return StepOutput(
            step_id=step.step_id,
            epoch=step.epoch,
            rank=self._rank,
            sampled_step_id=previous_step_id(step.step_id) if step.sample else NO_STEP,
            crc=token_crc(tokens),
            skew_us=skew_us,
            tokens=sampled,
        )

    def _find_node(self) -> _NodePlace:
        if self._config.distributed_executor_backend == "ray":
            return _ray_place(self._device_index)
        return _NodePlace(socket.gethostname(), LOOPBACK, self._device_index)


def _is_peer_loss(error: BaseException | None) -> bool:
    while error is not None:
        classes = {cls.__name__ for cls in type(error).__mro__}
        if _PEER_LOSS_CLASS in classes or _PEER_LOSS_TEXT in str(error):
            return True
        error = error.__cause__
    return False


def _ray_place(default_device: int) -> _NodePlace:
    import ray  # Only ranks under ray pay for it.

    if not ray.is_initialized():
        return _NodePlace(socket.gethostname(), LOOPBACK, default_device)
    context = ray.get_runtime_context()
    accelerators = context.get_accelerator_ids().get("GPU") or [str(default_device)]
    return _NodePlace(context.get_node_id(), ray.util.get_node_ip_address(), int(accelerators[0]))


def _model_runner(config: EngineConfig) -> Runner:
    # Here and not above: the driver imports this module to name the class and needs no torch.
    from tpinference_engine.runner.model_runner import ModelRunner

    return ModelRunner(config)
