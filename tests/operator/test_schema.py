"""The generated CRD: structural, bounded, as checked in, and its defaults never changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tpinference_operator.api.generate import generated, main, to_yaml
from tpinference_operator.api.rules import OWNED_ENV, OWNED_FLAGS, RULES
from tpinference_operator.api.schema import crd, object_schema

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden_defaults.json")

Schema = dict[str, Any]


def walk(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}".lstrip("."))
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from walk(node[key], f"{path}[]")


SPEC = dict(walk(object_schema()["properties"]["spec"]))
EVERYTHING = dict(walk(object_schema()))


def test_checked_in_files_are_what_the_models_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(ROOT)]) == 0, capsys.readouterr().err


def test_check_names_a_stale_file_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 0
    stale = tmp_path / "crds" / "tpinferences.yaml"
    stale.write_text("old")
    assert main(["--check", str(tmp_path)]) == 1
    assert str(stale) in capsys.readouterr().err
    assert stale.read_text() == "old"


def test_defaults_never_change() -> None:
    """A default is part of every stored revision that lacks the field. A new field is added to the
    golden file by hand; an old line is never edited."""
    defaults = {path: node["default"] for path, node in SPEC.items() if "default" in node}
    assert defaults == json.loads(GOLDEN.read_text())


def test_yaml_is_read_back_as_the_crd() -> None:
    assert yaml.safe_load(to_yaml(crd())) == crd()


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, {"b": [], "c": {}}, [2, "x: y"]], "yes": "no", "n": None, "t": True},
        ["- a", "#", "1.0", "a'b\"c", "ü"],
    ],
    ids=["nested", "awkward strings"],
)
def test_yaml_of_any_json_is_read_back(value: Any) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


def test_the_chart_keeps_the_crd_when_it_is_removed() -> None:
    text = generated()["charts/tpinference-crds/templates/tpinferences.yaml"]
    kept = yaml.safe_load(text)
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "{{" not in text
    assert kept["spec"] == crd()["spec"]


def test_crd_is_small_enough_for_client_side_apply() -> None:
    assert len(json.dumps(crd())) < 200_000


def test_nothing_of_json_schema_is_left_that_a_structural_schema_forbids() -> None:
    text = json.dumps(crd())
    assert "$ref" not in text and "$defs" not in text and '"null"' not in text
    assert '"title"' not in text and "exclusiveM" not in text


def test_every_string_and_list_is_bounded() -> None:
    own = {p: n for p, n in EVERYTHING.items() if p not in ("apiVersion", "kind", "metadata")}
    unbounded = [
        path
        for path, node in own.items()
        if (node.get("type") == "string" and not {"maxLength", "enum"} & node.keys())
        or (node.get("type") == "array" and "maxItems" not in node)
        or ("additionalProperties" in node and "maxProperties" not in node)
    ]
    assert unbounded == []


def test_every_list_says_how_it_is_merged() -> None:
    kinds = {p: n.get("x-kubernetes-list-type") for p, n in EVERYTHING.items() if "items" in n}
    assert set(kinds.values()) <= {"atomic", "map"}
    assert kinds["status.conditions"] == "map"
    assert kinds["spec.engine.env"] == "map"


def test_keys_of_keyed_lists_are_required() -> None:
    for path, node in EVERYTHING.items():
        for key in node.get("x-kubernetes-list-map-keys", ()):
            assert key in node["items"]["required"], path


def test_every_integer_is_an_int32() -> None:
    integers = [n for n in EVERYTHING.values() if n.get("type") == "integer"]
    assert {n["format"] for n in integers} == {"int32"}


def test_every_section_without_required_fields_defaults_to_empty() -> None:
    for path in ("engine", "engine.compiledGraph", "head", "workers", "healthCheck.canary"):
        assert SPEC[path]["default"] == {}, path


def test_every_field_is_described() -> None:
    plain = {p: n for p, n in SPEC.items() if p and not p.endswith("[]")}
    assert [p for p, n in plain.items() if not n.get("description")] == []


def test_every_rule_is_in_the_schema_and_names_its_field() -> None:
    stored = [v for n in EVERYTHING.values() for v in n.get("x-kubernetes-validations", ())]
    assert sorted(v["message"] for v in stored) == sorted(rule.message for rule in RULES)
    for rule in RULES:
        where = rule.path.replace("[]", "") or "metadata.name"
        assert rule.message.startswith(where), rule.message


def test_messages_list_what_is_owned() -> None:
    text = " ".join(rule.message for rule in RULES)
    assert [name for name in (*OWNED_FLAGS, *OWNED_ENV) if name not in text] == []


def test_scale_and_columns_point_at_fields_that_exist() -> None:
    version = crd()["spec"]["versions"][0]
    paths = [
        c["jsonPath"] for c in version["additionalPrinterColumns"] if "[?" not in c["jsonPath"]
    ]
    paths += version["subresources"]["scale"].values()
    known = {f".{path}" for path in EVERYTHING} | {".metadata.creationTimestamp"}
    assert [p for p in paths if p not in known] == []
