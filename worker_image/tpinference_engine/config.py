"""The settings of an engine and of the server around it, passed to every module that needs one.

They check themselves and never change. It does not know where they came from (`command_line.py`)
nor what a model directory holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpinference_engine.errors import InvalidConfig
from tpinference_engine.step import StepLimits

Backend = Literal["ray", "mp", "uni"]
Device = Literal["cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
SchedulingPolicy = Literal["fcfs", "priority"]
"""Who goes first: who came first, or the lowest `priority` and among equals who came first."""
Transport = Literal["compiled-graph", "actor-call", "shared-memory"]

TRANSPORTS_OF_BACKEND: dict[Backend, tuple[Transport, ...]] = {
    "ray": ("compiled-graph", "actor-call"),
    "mp": ("shared-memory",),
    "uni": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine: one model on one group of `tensor_parallel_size` ranks."""

    model: Path
    """A Hugging Face directory."""
    served_model_name: tuple[str, ...]
    """Names clients may use; the first one is what answers carry."""
    dtype: Dtype = "auto"
    """auto = the checkpoint's own."""
    device: Device = "cuda"
    tensor_parallel_size: int = 1
    ranks_per_node: int | None = None
    """Ranks one Ray node holds; None = all of them on one node if it can, else as many as fit."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None = the model's own limit."""
    max_num_seqs: int = 256
    """Requests in one step at most: slots on the ranks."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step at most. Lower = smoother decode, higher = faster prefill; at least
    max_num_seqs, so that every running request gets its token in every step."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = True
    """Prefixes that were computed for one request are found by others, as long as they last."""
    block_size: int = 16
    """Tokens of one cache block."""
    num_gpu_blocks_override: int | None = None
    """Cache blocks (on CPU too); None = what fits."""
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    """Cache size of one rank; None = from gpu_memory_utilization, on CPU 1 GiB."""
    distributed_executor_backend: Backend = "ray"
    step_transport: Transport = "compiled-graph"
    """How steps reach the ranks under ray; mp has its own, uni needs none."""
    step_timeout_s: float = 300.0
    """A step that takes longer fails the group. Not under uni: there the step is on the very thread
    that would have to notice."""
    startup_timeout_s: float = 3600.0
    """From the start of the engine core until its first token has passed all ranks."""
    ray_address: str | None = None
    """host:port, or None for a local Ray of the engine's own."""
    engine_id: str = "engine"
    """In the actors' names; the RayCluster's name in a cluster."""
    epoch: int = 0
    """Incarnation of the group, in every message."""
    seed: int = 0
    """Of the seeds that unseeded requests get."""

    def __post_init__(self) -> None:
        _check_at_least_one(
            self,
            "tensor_parallel_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "ranks_per_node",
            "max_model_len",
            "num_gpu_blocks_override",
            "kv_cache_memory_bytes",
        )
        _check_positive(self, "step_timeout_s", "startup_timeout_s")
        if self.epoch < 0:
            raise InvalidConfig(f"epoch is {self.epoch!r}, must be at least 0")
        if not self.served_model_name:
            raise InvalidConfig("served_model_name is empty, must have at least one name")
        if not 0.0 < self.gpu_memory_utilization < 1.0:
            raise InvalidConfig(
                f"gpu_memory_utilization is {self.gpu_memory_utilization!r}, "
                "must be between 0 and 1"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens is {self.max_num_batched_tokens!r}, must be at least "
                f"max_num_seqs {self.max_num_seqs!r}"
            )
        self._check_layout()
        self._check_step_path()

    def _check_layout(self) -> None:
        if self.distributed_executor_backend == "uni" and self.tensor_parallel_size != 1:
            raise InvalidConfig(
                f"tensor_parallel_size is {self.tensor_parallel_size!r}, "
                "distributed_executor_backend 'uni' allows 1"
            )
        per_node = self.ranks_per_node
        if per_node is not None and self.tensor_parallel_size % min(
            per_node, self.tensor_parallel_size
        ):
            raise InvalidConfig(
                f"ranks_per_node is {per_node!r}, must divide tensor_parallel_size "
                f"{self.tensor_parallel_size!r} or be larger"
            )

    def _check_step_path(self) -> None:
        allowed = TRANSPORTS_OF_BACKEND["ray"]
        if self.distributed_executor_backend == "ray" and self.step_transport not in allowed:
            raise InvalidConfig(
                f"step_transport is {self.step_transport!r}, "
                f"distributed_executor_backend 'ray' allows {', '.join(map(repr, allowed))}"
            )

    def step_limits(self, max_model_len: int) -> StepLimits:
        """Bounds of one step, once the model's length is known."""
        return StepLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_blocks_per_slot=-(-max_model_len // self.block_size),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP side and of the process around it."""

    host: str = "0.0.0.0"
    port: int = 8000
    """OpenAI routes only."""
    admin_port: int = 8001
    """Probes, status, metrics, drain; never exposed outside the pod's network."""
    shutdown_timeout_s: float = 60.0
    """After SIGTERM, requests have this long to finish; what is left then is aborted."""
    canary_interval_s: float = 15.0
    """One reserved token goes through all ranks this often."""
    canary_timeout_s: float = 30.0
    canary_failure_threshold: int = 3
    """Canaries that fail in a row until the engine is not ready."""
    max_queued_requests: int = 1024
    """Requests admitted and not finished; over it the answer is 429."""
    failure_file: Path | None = None
    """Where the engine leaves the reason it failed for, as JSON, for the supervisor."""
    pod_name: str | None = None
    node_name: str | None = None

    def __post_init__(self) -> None:
        for field in ("port", "admin_port"):
            if not 0 <= getattr(self, field) <= 65535:
                raise InvalidConfig(f"{field} is {getattr(self, field)!r}, must be 0 to 65535")
        if self.port == self.admin_port != 0:
            raise InvalidConfig(
                f"admin_port is {self.admin_port!r}, must differ from port {self.port!r}"
            )
        _check_at_least_one(self, "canary_failure_threshold", "max_queued_requests")
        _check_positive(self, "canary_interval_s", "canary_timeout_s")
        if self.shutdown_timeout_s < 0:
            raise InvalidConfig(
                f"shutdown_timeout_s is {self.shutdown_timeout_s!r}, must be at least 0"
            )


def _check_at_least_one(config: object, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if value is not None and value < 1:
            raise InvalidConfig(f"{field} is {value!r}, must be at least 1")


def _check_positive(config: object, *fields: str) -> None:
    for field in fields:
        if not getattr(config, field) > 0:
            raise InvalidConfig(f"{field} is {getattr(config, field)!r}, must be greater than 0")
