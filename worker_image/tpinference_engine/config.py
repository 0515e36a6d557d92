"""What the command line and the environment said, read once; every other module gets it passed.

`EngineConfig` checks itself and never changes. Flags have vLLM's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpinference_engine.errors import InvalidConfig

Backend = Literal["ray", "mp", "uni"]
Device = Literal["cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Transport = Literal["compiled-graph", "actor-call", "shared-memory"]


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
    """Ranks one Ray node holds; None = all of them on one node if it can, else one bundle a node."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None = the model's own limit."""
    max_num_seqs: int = 256
    """Requests in one step at most: slots on the ranks."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step at most. Lower = smoother decode, higher = faster prefill."""
    block_size: int = 16
    """Tokens of one cache block."""
    num_gpu_blocks_override: int | None = None
    """Cache blocks (on CPU too); None = what fits."""
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    """Cache size of one rank; None = from gpu_memory_utilization, on CPU 1 GiB."""
    distributed_executor_backend: Backend = "ray"
    step_transport: Transport = "compiled-graph"
    step_timeout_s: float = 300.0
    """A step that takes longer fails the group."""
    ray_address: str | None = None
    """host:port, or None for a local Ray of the engine's own."""
    engine_id: str = "engine"
    """In the actors' names; the RayCluster's name in a cluster."""
    epoch: int = 0
    """Incarnation of the group, in every message."""
    seed: int = 0
    """Of the seeds that unseeded requests get."""

    def __post_init__(self) -> None:
        for field in (
            "tensor_parallel_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
        ):
            if getattr(self, field) < 1:
                raise InvalidConfig(f"{field} is {getattr(self, field)!r}, must be at least 1")
        if not 0.0 < self.gpu_memory_utilization < 1.0:
            raise InvalidConfig(
                f"gpu_memory_utilization is {self.gpu_memory_utilization!r}, "
                "must be between 0 and 1"
            )
        if self.distributed_executor_backend == "uni" and self.tensor_parallel_size != 1:
            raise InvalidConfig(
                f"tensor_parallel_size is {self.tensor_parallel_size!r}, "
                "distributed_executor_backend 'uni' allows 1"
            )
