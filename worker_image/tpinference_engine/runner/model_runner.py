"""One rank's model behind the Runner interface: a step message in, sampled tokens out.

The host's side (slots, arrays) runs in the caller's thread; everything that touches a tensor runs
in the device queue, in the order SAMPLE(N-1), STATE(N), FORWARD(N). No request, no transport.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpinference_engine.config import EngineConfig
from tpinference_engine.model.config import ModelConfig, read_model_config
from tpinference_engine.model.llama import Llama
from tpinference_engine.model.load import load_llama, num_bytes
from tpinference_engine.model.parallel import GroupSetup, Kind, TensorParallel, open_store
from tpinference_engine.model.rope import Rotation, make_rotation
from tpinference_engine.model.shard import Shard, shard_of
from tpinference_engine.runner.base import RankSetup
from tpinference_engine.runner.batch import append_array, forward_arrays, sample_arrays
from tpinference_engine.runner.cache import CacheShape, PagedCache
from tpinference_engine.runner.capacity import count_blocks
from tpinference_engine.runner.compute import (
    Compute,
    ForwardTensors,
    SampleTensors,
    make_compute,
)
from tpinference_engine.runner.device_queue import DeviceQueue, QueuedTokens, make_queue, run
from tpinference_engine.runner.device_state import DeviceState
from tpinference_engine.runner.memory import measure_memory
from tpinference_engine.runner.slots import BatchSlots, SlotLimits
from tpinference_engine.runner.staging import NUM_BUFFERS, Staging
from tpinference_engine.runner.warmup import warm_up_steps
from tpinference_engine.step import StepInput

GROUP_KINDS: dict[str, Kind] = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True, slots=True)
class _Joined:
    """What `initialize` makes."""

    queue: DeviceQueue
    parallel: TensorParallel
    config: ModelConfig
    shard: Shard
    dtype: torch.dtype
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What `load_model` makes."""

    model: Llama
    rotation: Rotation
    compute: Compute
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Running:
    """What `allocate_cache` makes."""

    slots: BatchSlots
    limits: SlotLimits
    state: DeviceState
    staging: Staging
    outputs: tuple[torch.Tensor, ...]
    """Host memory for sampled tokens, used in turn like the staging buffers."""


class ModelRunner:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._store: object = None
        self._joined_or_none: _Joined | None = None
        self._loaded_or_none: _Loaded | None = None
        self._running: _Running | None = None
        self._turn = 0

    def open_store(self, address: str) -> tuple[str, int]:
        store = open_store(address, self._config.step_timeout_s)
        self._store = store
        return address, store.port

    def initialize(self, setup: RankSetup) -> None:
        config, cuda = self._config, self._config.device == "cuda"
        # Before the group: a model that can't be served is refused by every rank, at once.
        model = read_model_config(config.model)
        shard = shard_of(model, setup.rank, config.tensor_parallel_size)
        max_model_len = model.limit_model_len(config.max_model_len)
        device = torch.device("cuda", setup.device_index) if cuda else torch.device("cpu")
        group = GroupSetup(
            rank=setup.rank,
            size=config.tensor_parallel_size,
            store=setup.store,
            address=setup.address,
            kind=GROUP_KINDS[device.type],
            timeout_s=config.step_timeout_s,
        )
        self._joined_or_none = _Joined(
            queue=make_queue(device, setup.num_threads),
            parallel=TensorParallel(group),
            config=model,
            shard=shard,
            dtype=getattr(torch, model.choose_dtype(config.dtype)),
            max_model_len=max_model_len,
        )

    def load_model(self) -> int:
        self._loaded_or_none = run(self._joined.queue, self._load)
        return self._loaded.num_bytes

    def cache_capacity(self) -> int:
        joined, config = self._joined, self._config
        memory = run(
            joined.queue, lambda: measure_memory(config, self._loaded.model, joined.queue.device)
        )
        return count_blocks(
            memory.cache_bytes,
            self._cache_shape.block_bytes,
            needed=-(-joined.max_model_len // config.block_size),
            taken={"weights": self._loaded.num_bytes, **memory.taken},
            override=config.num_gpu_blocks_override,
        )

    def allocate_cache(self, num_blocks: int) -> None:
        limits = SlotLimits(
            num_slots=self._config.max_num_seqs,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            max_model_len=self._joined.max_model_len,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
        )
        self._running = run(self._joined.queue, lambda: self._allocate(limits))

    def warm_up(self) -> None:
        limits = self._allocated.limits
        lengths = self._loaded.compute.warm_up_lengths(limits.max_num_batched_tokens)
        for number, length in enumerate(lengths):
            for step in warm_up_steps(limits, length, limited=number == 0):
                self.enqueue(step).wait()
        if self._joined.queue.device.type == "cuda" and self._joined.parallel.can_be_captured:
            self._joined.queue.submit(self._allocated.state.capture)
        self.idle()

    def enqueue(self, step: StepInput) -> QueuedTokens:
        running, queue = self._allocated, self._joined.queue
        # 1. On the host: check the message and pack what the device will read.
        chosen = sample_arrays(running.slots.sample(step.sample))
        appended = append_array(running.slots.apply(step))
        running.slots.forward(step.forward, step.bucket)
        rows = running.state.fit(forward_arrays(step.forward), step.bucket)
        unpack = running.staging.pack(
            [
                chosen.columns,
                chosen.random_rows,
                appended,
                rows.tokens,
                rows.logits_columns,
                rows.chunk_columns,
            ]
        )
        self._turn = (self._turn + 1) % NUM_BUFFERS
        output = running.outputs[self._turn][: len(step.sample)]
        # 2. In the queue: two pieces of work, so that the sample can be waited for alone.
        tensors: list[torch.Tensor] = []

        def sample() -> None:
            tensors.extend(unpack())
            wanted = SampleTensors(tensors[0], tensors[1], chosen.limited)
            tokens_R = running.state.sample(wanted)
            output.copy_(tokens_R, non_blocking=True)

        def forward() -> None:
            running.state.append(tensors[2])
            running.state.forward(rows, ForwardTensors(*tensors[3:]))

        ticket = queue.submit(sample)
        queue.submit(forward)
        return QueuedTokens(ticket, output)

    def idle(self) -> None:
        if self._joined_or_none is not None:
            self._joined.queue.submit(_nothing).wait()

    def close(self) -> None:
        joined, self._joined_or_none = self._joined_or_none, None
        if joined is not None:
            joined.queue.close()
            joined.parallel.close()
        self._loaded_or_none = self._running = self._store = None

    def _load(self) -> _Loaded:
        joined = self._joined
        device = joined.queue.device
        weights = load_llama(self._config.model, joined.config, joined.shard, joined.dtype, device)
        rotation = make_rotation(
            joined.config.rope,
            head_dim=joined.config.head_dim,
            max_len=joined.max_model_len,
            dtype=joined.dtype,
            device=device,
        )
        compute = make_compute(device)
        model = Llama(joined.config, joined.shard, weights, joined.parallel, compute.ops)
        return _Loaded(model, rotation, compute, num_bytes(weights))

    def _allocate(self, limits: SlotLimits) -> _Running:
        loaded, device = self._loaded, self._joined.queue.device
        cache = PagedCache(
            self._cache_shape,
            num_blocks=limits.num_blocks,
            num_slots=limits.num_slots,
            max_blocks_per_slot=limits.max_blocks_per_slot,
            device=device,
        )
        outputs = torch.zeros(
            (NUM_BUFFERS, limits.num_slots), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        return _Running(
            slots=BatchSlots(limits),
            limits=limits,
            state=DeviceState(loaded.model, loaded.rotation, cache, loaded.compute),
            staging=Staging(device),
            outputs=tuple(outputs),
        )

    @property
    def _cache_shape(self) -> CacheShape:
        joined = self._joined
        return CacheShape(
            num_layers=joined.config.num_layers,
            block_size=self._config.block_size,
            num_kv_heads=len(joined.shard.kv_heads),
            head_dim=joined.config.head_dim,
            dtype=joined.dtype,
        )

    @property
    def _joined(self) -> _Joined:
        assert self._joined_or_none is not None, "initialize comes first, and close last"
        return self._joined_or_none

    @property
    def _loaded(self) -> _Loaded:
        assert self._loaded_or_none is not None, "load_model comes first"
        return self._loaded_or_none

    @property
    def _allocated(self) -> _Running:
        assert self._running is not None, "allocate_cache comes first"
        return self._running


def _nothing() -> None:
    """Work of a fence."""
