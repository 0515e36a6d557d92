"""Which block holds the keys and values of which tokens, so that a prefix is computed once.

A key is a hash of a block's tokens and of the key before it, so it stands for all tokens up to the
block's end. A chain begins with all else that its content depends on, and with the client's salt,
which keeps one client's prefixes from being found, and timed, by another. Keys are cryptographic
and the same on every machine: two contents never meet in one, and no client can make them. It does
not know who uses a block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Key = bytes
KEY_BYTES = 32
NO_ADAPTER = 0


def root_key(*, salt: str | None, adapter_id: int = NO_ADAPTER) -> Key:
    """What a chain begins with. No salt is not an empty one."""
    head = struct.pack("<i?", adapter_id, salt is not None)
    text = (salt or "").encode("utf-8", "surrogatepass")
    return blake2b(head + text, digest_size=KEY_BYTES).digest()


def next_key(parent: Key, tokens: Sequence[int]) -> Key:
    """Of the block that holds `tokens` behind the one with the key `parent`."""
    packed = struct.pack(f"<{len(tokens)}i", *tokens)
    return blake2b(parent + packed, digest_size=KEY_BYTES).digest()


class KeyChain:
    """The keys of one request's full blocks, each made once, when it is first asked for."""

    def __init__(self, root: Key, block_size: int) -> None:
        self._block_size = block_size
        self._keys = [root]

    def between(self, first: int, stop: int, tokens: Sequence[int]) -> Sequence[Key]:
        """Of the blocks `first` to `stop` of `tokens`, which only ever grows at its end."""
        size, keys = self._block_size, self._keys
        assert stop * size <= len(tokens), f"{stop} blocks of {size}, {len(tokens)} tokens"
        for start in range((len(keys) - 1) * size, stop * size, size):
            keys.append(next_key(keys[-1], tokens[start : start + size]))
        return keys[first + 1 : stop + 1]


class PrefixCache:
    def __init__(self) -> None:
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def longest(self, keys: Iterable[Key]) -> tuple[int, ...]:
        """The blocks of the keys, up to the first one that is not there."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def add(self, key: Key, block: int) -> None:
        """From now on `block` is found. Of two with the same content the first one stays it."""
        assert block not in self._keys, f"block {block} has a key already"
        if self._blocks.setdefault(key, block) == block:
            self._keys[block] = key

    def forget(self, block: int) -> None:
        """Its content is about to be written over."""
        del self._blocks[self._keys.pop(block)]

    def clear(self) -> None:
        self._blocks.clear()
        self._keys.clear()
