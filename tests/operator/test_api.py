"""The API's models: quantities, effects, tolerance of what is newer or spoilt."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from pydantic import ValidationError

from tpinference_operator.api.base import (
    QUANTITY_PATTERN,
    Effect,
    parse_quantity,
    quantity_ceil,
)
from tpinference_operator.api.reasons import (
    CONDITION_MEANING,
    ENGINE_REASONS,
    FAILING,
    FINAL,
    REASON_MEANING,
    RESTARTABLE,
    ConditionType,
    Reason,
    known_reason,
)
from tpinference_operator.api.schema import leaves
from tpinference_operator.api.status import TPInferenceStatus
from tpinference_operator.api.v1alpha1 import ParallelismSpec, TPInferenceSpec
from tpinference_operator.errors import InvalidQuantity, InvalidSpec
from tpinference_operator.observe import parse_tpinference

MakeTpi = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", "0.5"),
        ("1.5", "1.5"),
        ("2", "2"),
        ("2000m", "2"),
        ("1Ki", "1024"),
        ("1k", "1000"),
        ("512Mi", "536870912"),
        ("1.5Gi", "1610612736"),
        ("1e3", "1000"),
        ("100n", "1e-7"),
    ],
)
def test_quantity_is_what_kubernetes_reads(text: str, value: str) -> None:
    assert parse_quantity(text) == Decimal(value)


GOOD = (
    "1",
    "+1",
    "0.5",
    ".5",
    "1.",
    "100n",
    "5u",
    "500m",
    "1k",
    "4M",
    "2Gi",
    "1E",
    "1e3",
    "1E-3",
    "64Ki",
)
BAD = (
    "",
    "4kM",
    "1Zi",
    "Gi",
    "1.2.3",
    ".",
    "-1",
    "1 Gi",
    "1ki",
    "1mi",
    "1e",
    "1e+",
    "1e999",
    "1K",
    "1Gi\n",
)


@pytest.mark.parametrize("text", GOOD)
def test_what_the_crd_accepts_as_a_quantity_can_be_read(text: str) -> None:
    assert re.search(QUANTITY_PATTERN, text)
    assert quantity_ceil(text) >= 0


@pytest.mark.parametrize("text", BAD)
def test_other_text_is_refused_by_the_crd_and_named_with_its_field(
    make_tpi: MakeTpi, text: str
) -> None:
    owner = make_tpi(workers={"resources": {"limits": {"cpu": text}}})
    with pytest.raises(InvalidSpec, match=r"spec\.workers\.resources\.limits\.cpu"):
        parse_tpinference(owner)


@pytest.mark.parametrize(("text", "whole"), [("1m", 1), ("500m", 1), ("1.5", 2), ("2", 2)])
def test_whole_quantity_rounds_up(text: str, whole: int) -> None:
    assert quantity_ceil(text) == whole


@pytest.mark.parametrize("text", ["", "Gi", "1Zi", "1.2.3", "one"])
def test_other_text_is_no_quantity_and_the_error_shows_it(text: str) -> None:
    with pytest.raises(InvalidQuantity, match=repr(text)):
        parse_quantity(text)


def test_every_field_of_the_spec_has_one_effect() -> None:
    effects = {
        path: [mark for mark in field.metadata if isinstance(mark, Effect)]
        for path, field in leaves(TPInferenceSpec)
    }
    assert {path: marks for path, marks in effects.items() if len(marks) != 1} == {}


def test_only_replicas_and_service_change_without_a_restart() -> None:
    live = [p for p, field in leaves(TPInferenceSpec) if Effect.LIVE in field.metadata]
    assert live == ["replicas", "service.type", "service.port"]


def test_fields_of_a_newer_crd_are_ignored(make_tpi: MakeTpi) -> None:
    raw = make_tpi(engine={"speculation": {"tokens": 4}}, autoscaling={"max": 3})["spec"]
    assert TPInferenceSpec.model_validate(raw).engine.device == "CPU"


def test_a_parsed_spec_can_not_be_changed(make_spec: Callable[..., TPInferenceSpec]) -> None:
    spec = make_spec()
    with pytest.raises(ValidationError, match="frozen"):
        spec.replicas = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("tensor", "per_node", "nodes", "ranks"),
    [(1, 8, 1, 1), (2, 1, 2, 1), (8, 8, 1, 8), (6, 8, 1, 6), (16, 8, 2, 8)],
)
def test_nodes_and_ranks_a_pod_follow_from_parallelism(
    tensor: int, per_node: int, nodes: int, ranks: int
) -> None:
    layout = ParallelismSpec(tensor=tensor, gpus_per_node=per_node)
    assert (layout.nodes, layout.ranks_per_pod) == (nodes, ranks)


def test_numbers_and_text_of_a_quantity_are_the_same(make_tpi: MakeTpi) -> None:
    number, text = (
        TPInferenceSpec.model_validate(
            make_tpi(head={"resources": {"limits": {"cpu": cpu}}})["spec"]
        )
        for cpu in (2, "2")
    )
    assert number == text


def test_status_is_the_same_after_being_stored() -> None:
    status = TPInferenceStatus(replicas=1, epoch=3, url="http://x")
    assert TPInferenceStatus.model_validate(status.to_raw()) == status


def test_status_as_the_crd_defaults_it_is_readable() -> None:
    assert TPInferenceStatus.model_validate({"observedGeneration": -1}) == TPInferenceStatus()


def test_every_condition_and_reason_has_a_sentence() -> None:
    assert set(CONDITION_MEANING) == set(ConditionType)
    assert set(REASON_MEANING) == set(Reason)


def test_reason_sets_are_consistent() -> None:
    assert RESTARTABLE < ENGINE_REASONS < FAILING
    assert FINAL < FAILING


def test_a_foreign_reason_is_not_taken_for_one_of_ours() -> None:
    assert known_reason("HeadLost") is Reason.HEAD_LOST
    assert known_reason("SomethingElse") is None
