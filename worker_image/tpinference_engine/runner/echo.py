"""A runner without a model: the oracle for the rules of the lag.

Slots, generations, positions and the paged cache mean what they mean to the real runner, but the
cache holds token ids and a sampled token is a hash of what the cache gives back. So a wrong block,
a stale owner or a lost token changes every later token, and a test predicts them all with
`echo_token`. Like keys and values, what a position holds also depends on all positions before it:
a prefix that is not the request's own is noticed even where it has the same token. It needs no
torch and runs in the caller's thread.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import MessageCorrupt
from tpinference_engine.runner.base import RankSetup
from tpinference_engine.runner.slots import BatchSlots, SlotLimits
from tpinference_engine.step import ForwardRow, StepInput

DEFAULT_VOCAB_SIZE = 512
DEFAULT_NUM_BLOCKS = 64
DEFAULT_MAX_MODEL_LEN = 256
_NEVER_WRITTEN = -1
_NO_PREFIX = 0
_MODULUS = 2**61 - 1


def echo_token(tokens: Sequence[int], *, prompt_length: int, seed: int = 0, vocab_size: int) -> int:
    """The token that follows `tokens` (prompt and output). Greedy requests have seed 0 here."""
    words = np.array([prompt_length, seed, *tokens], dtype=np.int64)
    return zlib.crc32(words.tobytes()) % vocab_size


def _link(prefix: int, token: int) -> int:
    """What stands for `token` and all tokens before it."""
    return (prefix * 1_000_003 + token + 1) % _MODULUS


@dataclass(frozen=True, slots=True)
class _Tokens:
    tokens: list[int]

    def wait(self) -> list[int]:
        return self.tokens


class EchoRunner:
    def __init__(self, config: EngineConfig, *, vocab_size: int = DEFAULT_VOCAB_SIZE) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._last_token: dict[int, int] = {}
        self._logits: list[list[int]] = []
        self._num_users: Counter[int] = Counter()
        """Slots that have a block in their table."""

    def open_store(self, address: str) -> tuple[str, int]:
        return address, 0

    def initialize(self, setup: RankSetup) -> None:
        """Echoing ranks share nothing, so there is no group to join."""

    def load_model(self) -> int:
        return 0

    def cache_capacity(self) -> int:
        return self._config.num_gpu_blocks_override or DEFAULT_NUM_BLOCKS

    def allocate_cache(self, num_blocks: int) -> None:
        shape = (num_blocks, self._config.block_size)
        self._cache: npt.NDArray[np.int64] = np.full(shape, _NEVER_WRITTEN, dtype=np.int64)
        self._prefixes: npt.NDArray[np.int64] = self._cache.copy()
        limits = SlotLimits(
            num_slots=self._config.max_num_seqs,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            max_model_len=self._config.max_model_len or DEFAULT_MAX_MODEL_LEN,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
        )
        self._slots = BatchSlots(limits)

    def warm_up(self) -> None:
        """Nothing is slow the first time."""

    def enqueue(self, step: StepInput) -> _Tokens:
        tokens = self._sample(step)
        self._apply(step)
        self._forward(step)
        return _Tokens(tokens)

    def idle(self) -> None:
        """Nothing is ever queued."""

    def close(self) -> None:
        """Nothing is held."""

    def _sample(self, step: StepInput) -> list[int]:
        tokens: list[int] = []
        for choice in self._slots.sample(step.sample):
            params = choice.params
            token = echo_token(
                self._logits[choice.logits_row],
                prompt_length=params.prompt_length,
                seed=params.seed if params.temperature > 0 else 0,
                vocab_size=self._vocab_size,
            )
            self._last_token[params.slot] = token
            tokens.append(token)
        return tokens

    def _apply(self, step: StepInput) -> None:
        self._slots.apply(step)
        self._num_users = Counter()
        for slot in self._slots.in_use:
            blocks = self._slots.blocks_of(slot)
            if len(set(blocks)) < len(blocks):
                raise MessageCorrupt(f"slot {slot} has a block twice: {blocks!r}")
            self._num_users.update(blocks)

    def _forward(self, step: StepInput) -> None:
        self._slots.forward(step.forward, step.bucket)
        self._logits = []
        for row in step.forward:
            self._write(row)
        # Read back after every row was written, as attention would see it at the earliest.
        for row in step.forward:
            if row.wants_logits:
                self._logits.append(self._read(row))

    def _write(self, row: ForwardRow) -> None:
        tokens = row.tokens or (self._last_token[row.slot],)
        if any(not 0 <= token < self._vocab_size for token in tokens):
            raise MessageCorrupt(f"{row!r} has tokens outside of {self._vocab_size}")
        prefix = self._prefix_before(row)
        for position, token in enumerate(tokens, row.start):
            place = self._place(row.slot, position)
            if self._num_users[place[0]] > 1:
                raise MessageCorrupt(f"{row!r} writes to block {place[0]}, which others read")
            prefix = _link(prefix, token)
            self._cache[place], self._prefixes[place] = token, prefix

    def _prefix_before(self, row: ForwardRow) -> int:
        if row.start == 0:
            return _NO_PREFIX
        prefix = int(self._prefixes[self._place(row.slot, row.start - 1)])
        if prefix == _NEVER_WRITTEN:
            raise MessageCorrupt(f"{row!r} follows position {row.start - 1}, never written")
        return prefix

    def _read(self, row: ForwardRow) -> list[int]:
        end = row.start + row.num_tokens
        blocks = list(self._slots.blocks_of(row.slot))
        tokens: list[int] = self._cache[blocks].ravel()[:end].tolist()
        found: list[int] = self._prefixes[blocks].ravel()[:end].tolist()
        prefix = _NO_PREFIX
        for position, token in enumerate(tokens):
            prefix = _link(prefix, token)
            if prefix != found[position]:
                raise MessageCorrupt(
                    f"{row!r} reads position {position}, which was never written "
                    "or belongs to another prefix"
                )
        return tokens

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        block_size = self._config.block_size
        return self._slots.blocks_of(slot)[position // block_size], position % block_size
