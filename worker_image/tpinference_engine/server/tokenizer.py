"""The model's tokenizer: text to ids, and the vocabulary for the way back.

Methods are safe to call from several threads at once: an encoding runs outside the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from tpinference_engine.errors import InvalidModel
from tpinference_engine.server.detokenizer import Detokenizer
from tpinference_engine.server.vocabulary import Vocabulary


class Tokenizer:
    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._vocabulary = Vocabulary(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Special tokens (a begin mark) go before bare prompts; a chat template writes its own."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """All of it at once, special tokens too: what a prompt of ids looks like."""
        return b"".join(map(self._vocabulary.literal, token_ids)).decode(errors="replace")

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._vocabulary)


def load_tokenizer(model: Path) -> Tokenizer:
    path = model / "tokenizer.json"
    if not path.is_file():
        raise InvalidModel(f"model {str(model)!r} has no tokenizer.json")
    try:
        tokenizer = HFTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file that it can't read
        raise InvalidModel(f"tokenizer {str(path)!r} can't be read: {error}") from error
    return Tokenizer(tokenizer)
