"""Every CEL rule of the CRD accepts one object and rejects one, and its message names the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CRD = yaml.safe_load(
    (Path(__file__).resolve().parents[2] / "crds" / "tpinferences.yaml").read_text()
)
Spec = dict[str, Any]

# By the beginning of a rule's message: what it accepts and what it rejects, as changes of an
# object that is otherwise fine.
CASES: dict[str, tuple[Spec, Spec]] = {
    "metadata.name must have": ({"name": "a" * 40}, {"name": "a" * 41}),
    "spec.model.uri must be": (
        {"model": {"uri": "pvc://claim/a/b"}},
        {"model": {"uri": "s3://bucket/a"}},
    ),
    "spec.model.uri must not have": (
        {"model": {"uri": "file:///a/..b/c"}},
        {"model": {"uri": "file:///a/../c"}},
    ),
    "spec.engine.rayVersion must be": (
        {"engine": {"rayVersion": "2.52.0"}},
        {"engine": {"rayVersion": "2.51.9"}},
    ),
    "spec.engine.extraArgs must not": (
        {"engine": {"extraArgs": ["--block-size", "16"]}},
        {"engine": {"extraArgs": ["--tensor_parallel_size=4"]}},
    ),
    "spec.engine.env must not set": (
        {"engine": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}},
        {"engine": {"env": [{"name": "RAY_ADDRESS", "value": "x"}]}},
    ),
    "spec.engine.env must have value": (
        {"engine": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}]}},
        {
            "engine": {
                "env": [{"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}]
            }
        },
    ),
    "spec.engine.env.valueFrom must have": (
        {
            "engine": {
                "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
            }
        },
        {"engine": {"env": [{"name": "A", "valueFrom": {}}]}},
    ),
    "spec.engine.compiledGraph.bufferSize": (
        {"engine": {"compiledGraph": {"bufferSize": "2Mi"}}},
        {"engine": {"compiledGraph": {"bufferSize": "2Gi"}}},
    ),
    "spec.parallelism.tensor must be": (
        {"parallelism": {"tensor": 16, "gpusPerNode": 8}},
        {"parallelism": {"tensor": 12, "gpusPerNode": 8}},
    ),
    "spec.workers.resources must not name": (
        {"workers": {"resources": {"limits": {"cpu": "1"}}}},
        {"workers": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
    ),
    "spec.workers.shmSize must be": (
        {"workers": {"shmSize": "256Mi"}},
        {"workers": {"shmSize": "255Mi"}},
    ),
    **{
        f"spec.{pod}.tolerations{said}": (
            {pod: {"tolerations": [good]}},
            {pod: {"tolerations": [bad]}},
        )
        for pod in ("head", "workers")
        for said, good, bad in (
            (
                ": value must be absent",
                {"key": "a", "operator": "Exists"},
                {"key": "a", "operator": "Exists", "value": "b"},
            ),
            (": operator must be Exists", {"operator": "Exists"}, {"value": "b"}),
            (
                ": effect must be NoExecute",
                {"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1},
                {"key": "a", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 1},
            ),
        )
    },
}


def rules_of(schema: Any) -> Iterator[str]:
    """The messages of all rules in a schema."""
    if isinstance(schema, dict):
        for rule in schema.get("x-kubernetes-validations", []):
            yield rule["message"]
        for value in schema.values():
            yield from rules_of(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from rules_of(value)


MESSAGES = list(rules_of(CRD["spec"]["versions"][0]["schema"]))


def merged(old: Spec, new: Spec) -> Spec:
    both = {k: merged(old[k], v) if isinstance(v, dict) and k in old else v for k, v in new.items()}
    return {**old, **both}


@pytest.fixture
def try_to_create(client: Any, make_tpi: Callable[..., Spec]) -> Callable[[Spec], str]:
    """Creates it without storing it; what the API server says against it, or nothing."""

    def attempt(change: Spec) -> str:
        body = copy.deepcopy(make_tpi())
        body["metadata"]["name"] = change.get("name", "llm")
        body["spec"] = merged(body["spec"], {k: v for k, v in change.items() if k != "name"})
        try:
            client.request("POST", client.path("tpinferences") + "?dryRun=All", body)
        except Exception as error:
            return json.dumps(getattr(error, "body", str(error)))
        return ""

    return attempt


def test_every_rule_has_a_case_and_names_its_field() -> None:
    assert MESSAGES
    assert [m for m in MESSAGES if sum(m.startswith(case) for case in CASES) != 1] == []
    assert [c for c in CASES if not any(m.startswith(c) for m in MESSAGES)] == []
    assert [m for m in MESSAGES if not m.startswith(("spec.", "metadata."))] == []


@pytest.mark.parametrize("case", CASES)
def test_a_rule_accepts_one_object_and_rejects_one(
    case: str, try_to_create: Callable[[Spec], str]
) -> None:
    good, bad = CASES[case]
    assert try_to_create(good) == ""
    assert case in try_to_create(bad)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"replicas": 65}, "spec.replicas"),
        ({"replicas": -1}, "spec.replicas"),
        ({"parallelism": {"tensor": 0}}, "spec.parallelism.tensor"),
        ({"engine": {"device": "TPU"}}, "spec.engine.device"),
        ({"service": {"port": 70000}}, "spec.service.port"),
        ({"workers": {"shmSize": "much"}}, "spec.workers.shmSize"),
        ({"model": {"uri": ""}}, "spec.model.uri"),
    ],
)
def test_a_value_out_of_bounds_is_rejected_by_name(
    change: Spec, field: str, try_to_create: Callable[[Spec], str]
) -> None:
    assert field in try_to_create(change)


def test_an_unknown_field_is_refused_by_strict_validation(client: Any, make_tpi: Any) -> None:
    body = make_tpi(replikas=1)
    path = client.path("tpinferences") + "?dryRun=All&fieldValidation=Strict"
    with pytest.raises(Exception, match="replikas"):
        client.request("POST", path, body)


def test_a_minimal_object_is_accepted(client: Any) -> None:
    body = {
        "apiVersion": "serving.tpinference.dev/v1alpha1",
        "kind": "TPInference",
        "metadata": {"name": "m"},
        "spec": {"model": {"uri": "file:///m"}, "parallelism": {"tensor": 1}},
    }
    made = client.request("POST", client.path("tpinferences") + "?dryRun=All", body)
    assert made["spec"]["replicas"] == 1
