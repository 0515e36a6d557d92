"""What bytes a token stands for, taken from the decoder that tokenizer.json declares.

Bytes and not text, since a character may span tokens: text is only right for a whole run of them.
It knows two kinds of decoder, which cover the model families served: byte-level BPE (one printable
character a byte) and SentencePiece (a mark for the space, `<0xNN>` for a byte without a token).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from tpinference_engine.errors import InvalidModel

TokenBytes = Callable[[str], bytes]

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


def byte_level_bytes(token: str) -> bytes:
    """An added token may hold characters that are not of the alphabet: it is meant literally."""
    if all(character in BYTE_OF_CHARACTER for character in token):
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE_MARK, " ").encode()


def token_bytes_of(decoder: Mapping[str, Any] | None) -> TokenBytes:
    """The reading of tokens that a `decoder` section asks for."""
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if kinds & {"ByteFallback", "Metaspace"}:
        return sentencepiece_bytes
    raise InvalidModel(
        f"tokenizer.json has the decoder {sorted(kinds)!r}, "
        "must contain 'ByteLevel', 'ByteFallback' or 'Metaspace'"
    )


class Vocabulary:
    """Bytes by token id. Filled as ids are met: a vocabulary is large and few of it is used."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._read = token_bytes_of(json.loads(tokenizer.to_str())["decoder"])
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._shown: dict[int, bytes] = {}

    def shown(self, token_id: int) -> bytes:
        """Nothing for a special token, nor for an id of the padding that has no token."""
        known = self._shown.get(token_id)
        if known is None:
            hidden = token_id in self._special
            known = self._shown[token_id] = b"" if hidden else self.literal(token_id)
        return known

    def literal(self, token_id: int) -> bytes:
        """Special tokens too."""
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._read(token)
