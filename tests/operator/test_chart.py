"""The charts against the operator's code: what it may do, and what can be set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tpinference_operator.handlers import WATCHED
from tpinference_operator.kube import LEASE, TABLE
from tpinference_operator.settings import OPTIONS

CHARTS = Path(__file__).resolve().parents[2] / "charts"
CHART = CHARTS / "tpinference-operator"

UNCALLED = {("serving.tpinference.dev", "tpinferences/finalizers"): {"update"}}
"""Asked for by an admission plugin, not by a call."""


def granted(part: str) -> dict[tuple[str, str], set[str]]:
    rules = yaml.safe_load((CHART / "rules.yaml").read_text())[part]
    return {
        (group, resource): set(rule["verbs"])
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def needed() -> dict[tuple[str, str], set[str]]:
    needs: dict[tuple[str, str], set[str]] = {}
    for row in TABLE:
        if row is not LEASE:
            needs.setdefault((row.group, row.name), set()).update(row.verbs)
    for kind in WATCHED:
        needs.setdefault((kind.group, kind.plural), set()).update({"list", "watch"})
    return needs


def test_the_role_is_exactly_what_the_operator_calls() -> None:
    assert granted("watched") == needed() | UNCALLED
    assert granted("own") == {(LEASE.group, LEASE.name): set(LEASE.verbs)}


def test_the_schema_knows_every_value_and_refuses_every_other_name() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global", "enabled"}
    assert list(open_objects(values, schema)) == []


def open_objects(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> Any:
    """Paths whose misspelt names would be accepted, or whose names the schema lacks."""
    if not values:
        return
    if schema.get("additionalProperties") is not False:
        yield f"{path or 'root'} is open"
    for name, value in values.items():
        if name not in schema["properties"]:
            yield f"{path}.{name} is not in the schema"
        elif isinstance(value, dict) and not is_kubernetes_own(path + name):
            yield from open_objects(value, schema["properties"][name], f"{path}{name}.")


def is_kubernetes_own(path: str) -> bool:
    return path in ("resources.requests", "resources.limits")


def test_every_setting_of_the_deployment_is_one_of_the_operator() -> None:
    template = (CHART / "templates" / "deployment.yaml").read_text()
    named = {line.split()[-1] for line in template.splitlines() if "- name: TPINFERENCE" in line}
    assert named <= {option.variable for option in OPTIONS}
    assert len(named) == 8


def test_no_service_of_the_namespace_arrives_as_a_setting() -> None:
    """Kubernetes would set TPINFERENCE_OPERATOR_PORT for the chart's own Service."""
    template = (CHART / "templates" / "deployment.yaml").read_text()
    assert "enableServiceLinks: false" in template


def test_chart_versions_are_the_distributions(project_version: str) -> None:
    for chart in ("tpinference-crds", "tpinference-operator"):
        meta = yaml.safe_load((CHARTS / chart / "Chart.yaml").read_text())
        assert (meta["version"], meta["appVersion"]) == (project_version, project_version)
