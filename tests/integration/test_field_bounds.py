"""Bounds of single fields, as a real API server keeps them; rules across fields are CEL's.

Nothing is stored: every object is created as a dry run.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

Spec = dict[str, Any]
DRY_RUN = "?dryRun=All"


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
    change: Spec, field: str, client: Any, make_tpi: Any
) -> None:
    body = copy.deepcopy(make_tpi())
    body["spec"].update(change)
    with pytest.raises(Exception) as refused:
        client.request("POST", client.path("tpinferences") + DRY_RUN, body)
    assert field in json.dumps(getattr(refused.value, "body", str(refused.value)))


def test_a_minimal_object_is_accepted(client: Any) -> None:
    body = {
        "apiVersion": "serving.tpinference.dev/v1alpha1",
        "kind": "TPInference",
        "metadata": {"name": "m"},
        "spec": {"model": {"uri": "file:///m"}, "parallelism": {"tensor": 1}},
    }
    made = client.request("POST", client.path("tpinferences") + DRY_RUN, body)
    assert made["spec"]["replicas"] == 1
