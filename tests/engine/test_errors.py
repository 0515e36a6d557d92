"""What an error says of whose fault it is."""

from __future__ import annotations

import pytest

from tpinference_engine.errors import StepTimedOut


@pytest.mark.parametrize(
    ("late", "blamed", "said"),
    [((1,), 1, "ranks [1] in 2.5 s"), ((2, 0), None, "ranks [0, 2] in 2.5 s")],
)
def test_one_silent_rank_is_named_and_of_several_nobody(
    late: tuple[int, ...], blamed: int | None, said: str
) -> None:
    error = StepTimedOut.without(late, "a step", 2.5)
    assert error.rank == blamed
    assert str(error) == f"a step: no answer of {said}"


def test_a_wait_without_a_limit_has_none_to_tell() -> None:
    assert str(StepTimedOut.without((0,), "place", None)) == "place: no answer of ranks [0]"
