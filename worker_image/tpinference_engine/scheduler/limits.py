"""What bounds a request and a step, agreed once after start-up.

Plain data that also crosses to the API server, so that it refuses by the same numbers. It does not
know where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpinference_engine.config import SchedulingPolicy
from tpinference_engine.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_num_seqs: int
    """Requests in one step at most: slots."""
    max_num_batched_tokens: int
    """Tokens of one step at most, decodes and prompt chunks together."""
    max_num_requests: int
    """Requests admitted and not finished; over it admission says EngineBusy."""
    max_model_len: int
    """Tokens of prompt and output together. A request within it can finish alone in the whole
    cache, so preemption always ends."""
    block_size: int
    num_blocks: int
    """Blocks of the whole cache."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    scheduling_policy: SchedulingPolicy = "fcfs"

    def __post_init__(self) -> None:
        for field in ("max_num_batched_tokens", "max_num_requests", "block_size", "num_blocks"):
            if getattr(self, field) < 1:
                raise InvalidConfig(f"{field} is {getattr(self, field)!r}, must be at least 1")
        if self.max_num_seqs < 1:
            raise InvalidConfig(f"max_num_seqs is {self.max_num_seqs!r}, must be at least 1")
        if self.max_model_len < 2:
            raise InvalidConfig(f"max_model_len is {self.max_model_len!r}, must be at least 2")
        needed = self.blocks_for(self.max_model_len)
        if self.num_blocks < needed:
            room = self.num_blocks * self.block_size
            raise InvalidConfig(
                f"num_blocks is {self.num_blocks} of block_size {self.block_size}, which hold "
                f"{room} tokens, must be at least {needed} for one request of max_model_len "
                f"{self.max_model_len}: allow more blocks, or set max_model_len to {room} or less"
            )

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def bucket_for(self, num_tokens: int) -> int:
        """Padded size of a step: a power of two, so that ranks need few shapes; 0 stays 0."""
        if num_tokens == 0:
            return 0
        return min(1 << (num_tokens - 1).bit_length(), self.max_num_batched_tokens)
