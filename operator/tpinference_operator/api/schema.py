"""Turns the pydantic models into the CustomResourceDefinition with a structural schema.

The API server wants what pydantic does not write: no refs, no null, widths of integers, `{}` as
the default of each parent (CEL fails on an absent one), kinds of lists, CEL rules in their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from tpinference_operator import names
from tpinference_operator.api.base import Effect
from tpinference_operator.api.rules import RULES, Rule
from tpinference_operator.api.status import TPInferenceStatus
from tpinference_operator.api.v1alpha1 import TPInferenceSpec

Schema = dict[str, Any]

_ORDER = (
    "description",
    "type",
    "format",
    "default",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "maxItems",
    "maxProperties",
    "required",
    "properties",
    "additionalProperties",
    "items",
    "anyOf",
)
_DROPPED = ("title", "$defs")


def crd() -> dict[str, Any]:
    """The whole CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.KIND.lower(),
                "shortNames": ["tpi"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": _printer_columns(),
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": object_schema()},
                }
            ],
        },
    }


def object_schema() -> Schema:
    """Schema of a TPInference, rules included."""
    status = _without_defaults(structural(TPInferenceStatus))
    # Without this a tool that knows conditions only would call an unseen object finished.
    status["default"] = {"observedGeneration": -1}
    root: Schema = {
        "description": "One model, served tensor-parallel by groups of ranks.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(TPInferenceSpec),
            "status": status,
        },
    }
    for rule in RULES:
        _at(root, rule).setdefault("x-kubernetes-validations", []).append(rule.to_raw())
    return root


def structural(model: type[BaseModel]) -> Schema:
    """Structural schema of one model, refs inlined."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(raw, raw.get("$defs", {}))


def leaves(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, FieldInfo) of each field that is not itself a section of fields. A field with
    an effect of its own is a leaf, whatever its type."""
    for field in model.model_fields.values():
        where = f"{path}.{field.alias}" if path else str(field.alias)
        has_effect = any(isinstance(mark, Effect) for mark in field.metadata)
        section = field.annotation
        if not has_effect and isinstance(section, type) and issubclass(section, BaseModel):
            yield from leaves(section, where)
        else:
            yield where, field


def _at(root: Schema, rule: Rule) -> Schema:
    """The schema node that a rule's path names; a path that leads nowhere is our own mistake."""
    node = root
    for part in rule.path.split(".") if rule.path else ():
        node = node["properties"][part.removesuffix("[]")]
        if part.endswith("[]"):
            node = node["items"]
    return node


def _convert(node: Schema, defs: dict[str, Schema]) -> Schema:
    node = _resolve(_without_null(node), defs)
    out = {key: value for key, value in node.items() if key not in _DROPPED}
    if "properties" in out:
        out["properties"] = {name: _convert(p, defs) for name, p in out["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(out.get(key), dict):
            out[key] = _convert(out[key], defs)
    out.pop("propertyNames", None)
    if out.get("additionalProperties") is False:
        del out["additionalProperties"]
    if "const" in out:
        out["enum"] = [out.pop("const")]
    if out.get("type") == "integer":
        out["format"] = "int32"
    if out.get("type") == "array":
        out.setdefault("x-kubernetes-list-type", "atomic")
    if out.get("type") == "object":
        out = _with_default_of_parent(out)
    if isinstance(out.get("description"), str):
        out["description"] = " ".join(out["description"].split())
    return dict(sorted(out.items(), key=_position))


def _resolve(node: Schema, defs: dict[str, Schema]) -> Schema:
    """Replaces a ref by what it names; what stands beside the ref wins."""
    if "$ref" not in node:
        return node
    beside = {key: value for key, value in node.items() if key != "$ref"}
    return {**defs[node["$ref"].rsplit("/", 1)[-1]], **beside}


def _without_null(node: Schema) -> Schema:
    """`X or null` becomes X; absent is how Kubernetes says null."""
    out = dict(node)
    choices = [c for c in node.get("anyOf", ()) if c.get("type") != "null"]
    if len(choices) == 1:
        del out["anyOf"]
        out = {**choices[0], **out}
    if "default" in out and out["default"] is None:
        del out["default"]
    return out


def _with_default_of_parent(node: Schema) -> Schema:
    """A section whose fields all have defaults is `{}` when absent, and filled in from there."""
    if "default" in node:
        node["default"] = {}
    return node


def _without_defaults(node: Schema) -> Schema:
    """The operator writes a status whole; defaults in it would only hide what is absent."""
    out: Schema = {key: value for key, value in node.items() if key != "default"}
    if "properties" in out:
        out["properties"] = {name: _without_defaults(p) for name, p in out["properties"].items()}
    if isinstance(out.get("items"), dict):
        out["items"] = _without_defaults(out["items"])
    return out


def _position(item: tuple[str, Any]) -> tuple[int, str]:
    key = item[0]
    return (_ORDER.index(key) if key in _ORDER else len(_ORDER), key)


def _printer_columns() -> list[dict[str, Any]]:
    ready = '.status.conditions[?(@.type=="Ready")]'
    columns = (
        ("Ready", "string", f"{ready}.status", 0),
        ("Reason", "string", f"{ready}.reason", 0),
        ("Ready Replicas", "integer", ".status.readyReplicas", 0),
        ("Replicas", "integer", ".spec.replicas", 0),
        ("TP", "integer", ".spec.parallelism.tensor", 0),
        ("Nodes", "integer", ".status.layout.nodes", 0),
        ("Model", "string", ".spec.model.uri", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("URL", "string", ".status.url", 1),
        ("Revision", "string", ".status.currentRevision", 1),
    )
    return [
        {"name": name, "type": kind, "jsonPath": path, **({"priority": 1} if priority else {})}
        for name, kind, path, priority in columns
    ]
