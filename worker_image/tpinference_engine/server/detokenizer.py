"""Tokens to text, one at a time, in whole characters only.

The bytes of a character that is not complete wait for the next token. What is incomplete when a
request ends is dropped: half a character is no text, and a client that goes on from the text would
send the replacement character back.
"""

from __future__ import annotations

import codecs

from tpinference_engine.server.vocabulary import Vocabulary


class Detokenizer:
    """The text of one choice, as it grows."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._vocabulary.shown(token_id))
