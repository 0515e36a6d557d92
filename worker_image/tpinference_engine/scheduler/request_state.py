"""One admitted request: what is known of it, and where it is on the ranks.

`tokens` is the log: prompt and accepted output, all that a replay needs beside the parameters and
the seed. It does not know the other requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tpinference_engine.request import FinishReason, Request
from tpinference_engine.scheduler.prefix_cache import KeyChain


@dataclass(slots=True, eq=False)
class RequestState:
    request: Request
    arrival: int
    seed: int
    keys: KeyChain
    """Of its full blocks. As it only depends on the tokens, it outlives a preemption."""
    max_end: int = field(init=False)
    """Tokens of prompt and output at most."""
    tokens: list[int] = field(init=False)
    """Prompt and accepted output. Only ever appended to."""
    in_flight: int = 0
    """0 or 1: a token that is chosen from the last step's logits, by the next call."""
    num_computed: int = 0
    """Positions in its blocks, by steps that were sent since the request got its slot, or by those
    of the request that its first blocks are shared with."""
    num_sent_blocks: int = 0
    num_published_blocks: int = 0
    """Blocks that others may find by their keys: its first ones."""
    num_preemptions: int = 0
    slot: int | None = None
    generation: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.max_end = self.prompt_length + self.request.params.max_tokens
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first. The last one is preempted first."""
        return self.request.priority, self.arrival

    @property
    def deadline(self) -> float:
        return math.inf if self.request.deadline is None else self.request.deadline

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def end(self) -> int:
        """Position after the last token, known or in flight."""
        return len(self.tokens) + self.in_flight

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) + self.in_flight - self.num_computed

    @property
    def reaches_limit(self) -> bool:
        """With the token in flight it has all it may get, so a further step would be wasted."""
        return len(self.tokens) + self.in_flight >= self.max_end

    def finish_reason_after(self, token: int, eos_token_ids: Sequence[int]) -> FinishReason | None:
        """Why the request ends with `token`, the last of `tokens`; None if it goes on."""
        params = self.request.params
        is_eos = token in eos_token_ids and not params.ignore_eos
        if is_eos or token in params.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_end else None

    def place(self, slot: int, generation: int) -> None:
        self.slot, self.generation = slot, generation

    def displace(self) -> None:
        """Nothing of it is on the ranks any more. A token in flight still comes and is kept."""
        self.slot = None
        self.num_computed = 0
        self.num_sent_blocks = 0
        self.num_published_blocks = 0
