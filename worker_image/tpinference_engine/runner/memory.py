"""How much of a rank's memory the cache may have. On CUDA it is measured, weights already loaded.

All ranks measure together, since the pass that finds the peak of activations has collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tpinference_engine.config import EngineConfig
from tpinference_engine.model.llama import Llama
from tpinference_engine.runner.graphs import graph_sizes

CPU_CACHE_BYTES = 1 << 30
"""Unless kv_cache_memory_bytes says otherwise."""
GRAPH_BYTES = 256 << 20
"""Of all CUDA graphs besides the logits that each keeps: nodes, and what passes between them."""


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
    rows = sum(graph_sizes(config.max_num_seqs))
    graphs = GRAPH_BYTES + rows * model.vocab_size * torch.float32.itemsize
    budget = int(total * config.gpu_memory_utilization) - in_use - activations - graphs
    return Memory(
        config.kv_cache_memory_bytes or budget,
        {"device": total, "in use by all": in_use, "activations": activations, "graphs": graphs},
    )


def _peak_of_activations(config: EngineConfig, model: Llama, device: torch.device) -> int:
    """Of a step as large as admission allows, attention itself left out."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids_T = torch.zeros(config.max_num_batched_tokens, dtype=torch.int64, device=device)
    x_TD = model.forward(ids_T, lambda layer, heads: heads.qkv_TNK[:, : heads.num_heads])
    logits_RV = model.logits(x_TD[: config.max_num_seqs])
    logits_RV.softmax(dim=-1).sort(dim=-1)
    return torch.cuda.max_memory_allocated(device) - before
