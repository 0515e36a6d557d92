"""Every part of the model is on a rank, and no rank count has to divide anything."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from tpinference_engine.errors import InvalidConfig
from tpinference_engine.model.config import GenerationDefaults, ModelConfig, RopeConfig
from tpinference_engine.model.shard import Span, shard_of

MakeModel = Callable[..., ModelConfig]


@pytest.fixture
def make_model() -> MakeModel:
    def make(heads: int = 9, kv_heads: int = 3, mlp: int = 1536, vocab: int = 49152) -> ModelConfig:
        return ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=vocab,
            hidden_size=576,
            intermediate_size=mlp,
            num_layers=30,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=64,
            rms_norm_eps=1e-5,
            rope=RopeConfig(theta=1e4),
            max_position=8192,
            tie_word_embeddings=True,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            dtype="bfloat16",
            eos_token_ids=(2,),
            generation=GenerationDefaults(),
        )

    return make


def test_9_heads_over_3_kv_heads_run_on_2_ranks(make_model: MakeModel) -> None:
    shards = [shard_of(make_model(), rank, 2) for rank in range(2)]
    assert [s.heads for s in shards] == [Span(0, 6), Span(6, 9)]
    assert [s.kv_heads for s in shards] == [Span(0, 2), Span(2, 3)]
    assert [s.mlp for s in shards] == [Span(0, 768), Span(768, 1536)]


def test_kv_heads_are_replicated_over_more_ranks(make_model: MakeModel) -> None:
    shards = [shard_of(make_model(), rank, 4) for rank in range(4)]
    assert [s.heads for s in shards] == [Span(0, 2), Span(2, 3), Span(3, 6), Span(6, 9)]
    assert [s.kv_heads for s in shards] == [Span(0, 1), Span(0, 1), Span(1, 2), Span(2, 3)]


@pytest.mark.parametrize("mlp", [1536, 101, 5, 8960])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 8), (32, 8), (14, 2), (5, 1)])
def test_parts_cover_the_model_for_every_number_of_ranks(
    make_model: MakeModel, heads: int, kv_heads: int, mlp: int
) -> None:
    model = make_model(heads, kv_heads, mlp, vocab=1009)
    for size in range(1, min(heads, mlp) + 1):
        shards = [shard_of(model, rank, size) for rank in range(size)]
        for spans, total in (
            ([s.heads for s in shards], heads),
            ([s.mlp for s in shards], mlp),
        ):
            assert spans[0].start == 0 and spans[-1].stop == total
            assert all(a.stop == b.start for a, b in pairwise(spans))
            assert all(len(span) for span in spans)
        for shard in shards:
            assert len(shard.heads) % len(shard.kv_heads) == 0
            read_by = {head // (heads // kv_heads) for head in range(*_ends(shard.heads))}
            assert read_by == set(range(*_ends(shard.kv_heads)))
        assert len({len(s.vocab) for s in shards}) == 1
        assert shards[-1].vocab.stop >= 1009


def test_more_ranks_than_heads_are_refused(make_model: MakeModel) -> None:
    with pytest.raises(InvalidConfig, match="tensor_parallel_size is 10.*9 attention heads"):
        shard_of(make_model(), 0, 10)


def _ends(span: Span) -> tuple[int, int]:
    return span.start, span.stop
