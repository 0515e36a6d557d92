"""What blocks a request has, needs, and finds computed already.

Between the requests and the pool: tokens on one side, block numbers on the other. It does not know
which request is served and when.
"""

from __future__ import annotations

from tpinference_engine.scheduler.block_pool import BlockPool
from tpinference_engine.scheduler.limits import SchedulerLimits
from tpinference_engine.scheduler.prefix_cache import PrefixCache
from tpinference_engine.scheduler.request_state import RequestState


class RequestBlocks:
    def __init__(self, limits: SchedulerLimits, *, shares_prefixes: bool) -> None:
        self._limits = limits
        self.shares_prefixes = shares_prefixes
        self._cache = PrefixCache()
        self._pool = BlockPool(limits.num_blocks, self._cache)

    @property
    def num_free(self) -> int:
        """Blocks that no request has, whatever they hold."""
        return self._pool.num_free

    # What a request needs.

    def num_missing(self, state: RequestState, num_tokens: int) -> int:
        """Blocks it has to get before its first `num_tokens` tokens are in the cache."""
        wanted = self._limits.blocks_for(num_tokens)
        return max(0, wanted - self._pool.num_owned(state.request_id))

    def num_promised(self, state: RequestState) -> int:
        """For all its tokens and one more, else its first decode might preempt it again."""
        return self.num_missing(state, min(state.end + 1, state.max_end))

    def num_to_begin(self, state: RequestState, prefix: tuple[int, ...]) -> int:
        """Free blocks that a waiting request takes in the end, if it begins with `prefix`."""
        return self.num_promised(state) - self._pool.num_in_use(prefix)

    # What it gets and gives back.

    def grow(self, state: RequestState, num_tokens: int) -> None:
        self._pool.allocate(state.request_id, self.num_missing(state, num_tokens))

    def release(self, state: RequestState) -> None:
        self._pool.release(state.request_id)

    def take_untold(self, state: RequestState) -> tuple[int, ...]:
        """The blocks that ranks have not heard of, to be told by the next message."""
        blocks = self._pool.blocks_of(state.request_id, state.num_sent_blocks)
        state.num_sent_blocks += len(blocks)
        return blocks

    # What is computed once.

    def find_prefix(self, state: RequestState) -> tuple[int, ...]:
        """Cached blocks that a waiting request can begin with. The last token is never among
        them: its logits are wanted, so at least that one is computed."""
        if not self.shares_prefixes:
            return ()
        most = (len(state.tokens) - 1) // self._limits.block_size
        return self._cache.longest(state.keys.between(0, most, state.tokens))

    def begin_with(self, state: RequestState, prefix: tuple[int, ...]) -> None:
        self._pool.share(state.request_id, prefix)
        state.num_computed = len(prefix) * self._limits.block_size
        state.num_published_blocks = len(prefix)

    def publish(self, state: RequestState) -> None:
        """Lets others find its full blocks, once their steps were sent and their tokens known.

        Ranks write in the order of the steps, so whoever finds a block reads it in a later one. A
        token in flight may be past the request's end: its block waits until it is accepted.
        """
        full = min(state.num_computed, len(state.tokens)) // self._limits.block_size
        first = state.num_published_blocks
        if not self.shares_prefixes or full <= first:
            return
        keys = state.keys.between(first, full, state.tokens)
        for key, block in zip(keys, self._pool.blocks_of(state.request_id, first), strict=False):
            self._cache.add(key, block)
        state.num_published_blocks = full

    def forget_prefixes(self) -> None:
        """Nothing that was computed until now is found any more."""
        self._pool.forget_cached()

    # For tests.

    def check_integrity(self) -> None:
        self._pool.check_integrity()

    def num_owned(self, state: RequestState) -> int:
        return self._pool.num_owned(state.request_id)
