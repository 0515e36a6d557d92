"""Which steps a graph can run, which graph it is, and what fills it up. No GPU is needed."""

from __future__ import annotations

import pytest

from tpinference_engine.runner.batch import FROM_SLOT, PADDING_POSITION, forward_arrays
from tpinference_engine.runner.graphs import DecodeGraphs, graph_sizes
from tpinference_engine.step import ForwardRow


def decode(slot: int, start: int) -> ForwardRow:
    return ForwardRow(slot, 1, start, 1, (), True)


def chunk(slot: int, start: int, count: int, wants_logits: bool = True) -> ForwardRow:
    return ForwardRow(slot, 1, start, count, tuple(range(count)), wants_logits)


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 8)), (256, (1, 2, 4, 8, 16, 32, 64, 128, 256))],
)
def test_sizes_are_powers_of_two_that_hold_all_rows(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_rows) == sizes


def test_bucket_names_the_smallest_graph_that_holds_it() -> None:
    graphs = DecodeGraphs()
    assert [graphs.size_for(bucket) for bucket in (0, 1, 8)] == [0, 0, 0]
    graphs.sizes = graph_sizes(8)
    found = {bucket: graphs.size_for(bucket) for bucket in (0, 1, 2, 3, 5, 8, 9, 2048)}
    assert found == {0: 0, 1: 1, 2: 2, 3: 4, 5: 8, 8: 8, 9: 0, 2048: 0}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([decode(0, 5), decode(3, 0)], True),
        ([chunk(0, 0, 1)], True),
        ([], False),
        ([decode(0, 5), chunk(1, 0, 2)], False),
        ([decode(0, 5), chunk(1, 0, 1, wants_logits=False)], False),
    ],
    ids=["decodes", "prompt of one token", "flush", "with a chunk", "without logits"],
)
def test_graphs_run_steps_of_decodes_alone(rows: list[ForwardRow], expected: bool) -> None:
    assert forward_arrays(rows).only_decodes is expected


def test_padding_is_at_no_position_and_after_all_rows() -> None:
    arrays = forward_arrays([decode(6, 5), decode(2, 9), decode(4, 0)])
    padded = arrays.padded(4)
    assert padded.is_padded and not arrays.is_padded
    assert padded.tokens[:, :3].tolist() == arrays.tokens.tolist()
    assert padded.tokens[:, 3].tolist() == [0, 0, PADDING_POSITION]
    assert padded.logits_columns.tolist() == [0, 1, 2]


def test_chunks_begin_after_the_single_tokens() -> None:
    arrays = forward_arrays([chunk(7, 32, 3), decode(1, 5), chunk(2, 0, 2), decode(3, 8)])
    assert arrays.num_single == 2
    # Slot, place among the chunks' tokens, tokens, position.
    assert arrays.chunk_columns.T.tolist() == [[7, 0, 3, 32], [2, 3, 2, 0]]
    assert arrays.tokens[:, :2].tolist() == [[FROM_SLOT] * 2, [1, 3], [5, 8]]
    assert arrays.tokens[2, 2:].tolist() == [32, 33, 34, 0, 1]
    # In the message's order.
    assert arrays.logits_columns.tolist() == [4, 0, 6, 1]
    assert forward_arrays([decode(1, 5)]).chunk_columns.shape == (4, 0)
