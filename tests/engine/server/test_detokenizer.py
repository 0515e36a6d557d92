"""Tokens to text: whole characters, whatever the tokens they are in."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as HFTokenizer

from tpinference_engine.errors import InvalidModel
from tpinference_engine.server.tokenizer import Tokenizer, load_tokenizer
from tpinference_engine.server.vocabulary import token_bytes_of

TEXTS = [
    "plain",
    "na\u00efve caf\u00e9",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "e\u0301 \r\n\t end",
    "\ufffd is a character too",
]


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.push(token_id) for token_id in token_ids]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_a_character_wait_for_each_other(tokenizer: Tokenizer, text: str) -> None:
    shown = pieces(tokenizer, list(text.encode()))
    assert "".join(shown) == text
    assert [piece for piece in shown if piece] == list(text)


def test_incomplete_character_at_the_end_is_not_shown(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, list("ok \U0001f600".encode()[:-1]))) == "ok "


def test_byte_that_can_not_begin_a_character_is_replaced_at_once(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [0x80, ord("a")]) == ["\ufffd", "a"]


def test_special_token_is_not_shown_but_a_prompt_has_it(tokenizer: Tokenizer, end_id: int) -> None:
    assert pieces(tokenizer, [ord("a"), end_id, ord("b")]) == ["a", "", "b"]
    assert tokenizer.decode([ord("a"), end_id]) == "a<|end|>"


def test_id_without_a_token_is_nothing(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [100_000]) == [""]


@pytest.fixture(scope="module")
def sentencepiece() -> HFTokenizer:
    """As Llama 2 and Mistral have it: a mark for the space, single bytes for what has no token."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581Hello", "\u4f60"]
    tokenizer = HFTokenizer(
        models.BPE(
            vocab={token: at for at, token in enumerate(tokens)}, merges=[], byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def test_byte_fallback_makes_whole_characters(sentencepiece: HFTokenizer) -> None:
    names = ["\u4f60", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "\u2581Hello", "<0x0A>", "</s>"]
    ids = [sentencepiece.get_vocab()[name] for name in names]
    shown = pieces(Tokenizer(sentencepiece), ids)
    assert shown == ["\u4f60", "", "", "", "\U0001f600", " Hello", "\n", ""]
    assert "".join(shown) == sentencepiece.decode(ids)


def test_space_that_begins_an_answer_is_kept(sentencepiece: HFTokenizer) -> None:
    """An answer goes on from its prompt: it is not the begin of a text."""
    assert pieces(Tokenizer(sentencepiece), [258]) == [" Hello"]


@pytest.mark.parametrize(
    "decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}], ids=["none", "other"]
)
def test_unknown_decoder_is_refused(decoder: dict[str, object] | None) -> None:
    with pytest.raises(InvalidModel, match="decoder"):
        token_bytes_of(decoder)


def test_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_tokenizer_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(InvalidModel, match="can't be read"):
        load_tokenizer(tmp_path)


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_real_tokenizer_and_back(smollm2_dir: Path, text: str) -> None:
    reference = HFTokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    tokenizer = load_tokenizer(smollm2_dir)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert list(ids) == reference.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, list(ids))) == reference.decode(list(ids)) == text


@pytest.mark.model
def test_every_token_of_the_real_vocabulary_has_the_reference_text(smollm2_dir: Path) -> None:
    reference = HFTokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    tokenizer = load_tokenizer(smollm2_dir)
    for token_id in range(reference.get_vocab_size()):
        text = reference.decode([token_id], skip_special_tokens=False)
        assert tokenizer.decode([token_id]) == text, token_id
