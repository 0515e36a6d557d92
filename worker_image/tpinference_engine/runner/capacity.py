"""How many cache blocks fit, and what to say if they do not. Pure arithmetic over byte counts."""

from __future__ import annotations

from collections.abc import Mapping

from tpinference_engine.errors import InsufficientResources

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def count_blocks(
    budget_bytes: int,
    block_bytes: int,
    *,
    needed: int,
    taken: Mapping[str, int],
    override: int | None = None,
) -> int:
    """Blocks within the budget, or `override`. `needed` is what one request of full length takes;
    `taken` names what else uses the memory, for the message."""
    fitting = max(0, budget_bytes) // block_bytes
    num_blocks = fitting if override is None else override
    if num_blocks >= needed:
        return num_blocks
    rest = ", ".join(f"{name} {format_bytes(size)}" for name, size in taken.items())
    raise InsufficientResources(
        f"the cache has room for {num_blocks} blocks of {format_bytes(block_bytes)} "
        f"({format_bytes(max(0, budget_bytes))} in all), one request of max_model_len needs "
        f"{needed} blocks, {format_bytes(needed * block_bytes)}; memory: {rest}. Lower "
        "max_model_len, or raise kv_cache_memory_bytes, num_gpu_blocks_override or the memory"
    )


def format_bytes(size: int) -> str:
    for unit, name in _UNITS:
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"
