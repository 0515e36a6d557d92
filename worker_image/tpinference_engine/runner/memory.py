"""How much of a rank's memory the cache may have. On CUDA it is measured, weights already loaded.

All ranks measure together, since the pass that finds the peak of activations has collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tpinference_engine.config import EngineConfig
from tpinference_engine.model.llama import Llama

CPU_CACHE_BYTES = 1 << 30
"""Unless kv_cache_memory_bytes says otherwise."""


@dataclass(frozen=True, slots=True)
class Memory:
    cache_bytes: int
    taken: Mapping[str, int]
    """What else there is, by name, for a message."""


def measure_memory(config: EngineConfig, model: Llama, device: torch.device) -> Memory:
    if device.type != "cuda":
        return Memory(config.kv_cache_memory_bytes or CPU_CACHE_BYTES, {})
    activations = _peak_of_activations(config, model, device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    in_use = total - free
    budget = int(total * config.gpu_memory_utilization) - in_use - activations
    return Memory(
        config.kv_cache_memory_bytes or budget,
        {"device": total, "in use by all": in_use, "activations": activations},
    )


def _peak_of_activations(config: EngineConfig, model: Llama, device: torch.device) -> int:
    """Of a step as large as admission allows, attention itself left out."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids_T = torch.zeros(config.max_num_batched_tokens, dtype=torch.int64, device=device)
    x_TD = model.forward(ids_T, ids_T, lambda layer, q_THK, k_TGK, v_TGK: q_THK)
    logits_RV = model.logits(x_TD[: config.max_num_seqs])
    logits_RV.softmax(dim=-1).sort(dim=-1)
    return torch.cuda.max_memory_allocated(device) - before
