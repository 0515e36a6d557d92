"""Where text is cut, and what is held back until that is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpinference_engine.server.stop import StopFinder, find_stop, held_length


def run(pieces: list[str], stops: tuple[str, ...]) -> tuple[list[str], bool]:
    finder = StopFinder(stops)
    shown = []
    for piece in pieces:
        text, stopped = finder.push(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, finder.flush()], False


def test_stop_string_of_three_tokens_is_never_shown() -> None:
    assert run(["DEF", "G", "HI", "J"], ("DEFGHIJ",)) == (["", "", "", ""], True)


def test_text_after_the_stop_in_the_same_token_is_cut() -> None:
    assert run(["beta ", "gamma delta"], ("beta gamma",)) == (["", ""], True)


def test_text_that_did_not_become_a_stop_is_shown_in_the_end() -> None:
    assert run(["x", "abc"], ("abcdef",)) == (["x", "", "abc"], False)


def test_held_text_is_shown_as_soon_as_it_can_not_become_a_stop() -> None:
    assert run(["ab", "cx", "d"], ("abcd",)) == (["", "abcx", "d", ""], False)


def test_overlapping_beginning_of_a_stop_is_kept() -> None:
    assert run(["aa", "ab"], ("aab",)) == (["", "a"], True)


@pytest.mark.parametrize(
    ("text", "stops", "at"),
    [
        ("abcd", ("bcd", "c"), 2),
        ("abcd", ("cd", "bcd"), 1),
        ("abcd", ("x",), None),
        ("abcd", (), None),
    ],
    ids=["complete first wins", "longest of those that end together", "absent", "no stops"],
)
def test_first_complete_stop_wins(text: str, stops: tuple[str, ...], at: int | None) -> None:
    assert find_stop(text, stops) == at


def test_nothing_is_held_without_stops() -> None:
    assert held_length("abc", ()) == 0


@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4).map(tuple),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_cut_does_not_depend_on_how_text_is_divided(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    borders = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    whole, by_character = run([text], stops), run(list(text), stops)
    divided = run(pieces, stops)
    assert "".join(divided[0]) == "".join(whole[0]) == "".join(by_character[0])
    assert divided[1] == whole[1] == any(stop in text for stop in stops)
    assert not any(stop in "".join(divided[0]) for stop in stops)
