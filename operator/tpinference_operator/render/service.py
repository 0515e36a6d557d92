"""The Service that clients talk to, and how it is compared with the live one.

Its selector never changes: traffic is moved by the label on the head pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpinference_operator import names
from tpinference_operator.api.v1alpha1 import TPInferenceSpec
from tpinference_operator.render.raycluster import Owner

_PORT_FIELDS = ("name", "protocol", "port", "targetPort")


def render_service(spec: TPInferenceSpec, owner: Owner) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": owner.name,
            "namespace": owner.namespace,
            "labels": names.child_labels(owner.name),
            "ownerReferences": [owner.reference()],
        },
        "spec": {
            "type": spec.service.type.value,
            "selector": head_selector(owner.name),
            "ports": [
                {
                    "name": "http",
                    "protocol": "TCP",
                    "port": spec.service.port,
                    "targetPort": names.API_PORT,
                }
            ],
        },
    }


def head_selector(name: str) -> dict[str, str]:
    return {
        names.NAME_LABEL: name,
        names.ROLE_LABEL: names.ROLE_HEAD,
        names.TRAFFIC_LABEL: names.TRAFFIC_ON,
    }


def service_differs(live: Mapping[str, Any], rendered: Mapping[str, Any]) -> bool:
    """Whether one of the fields that are ours is not as rendered. What the API server or others
    added beside them does not count, but ports do."""
    spec, want = live.get("spec") or {}, rendered["spec"]
    labels = live["metadata"].get("labels") or {}
    return (
        spec.get("type") != want["type"]
        or spec.get("selector") != want["selector"]
        or _ports(spec) != _ports(want)
        or any(labels.get(k) != v for k, v in rendered["metadata"]["labels"].items())
    )


def has_foreign_ports(live: Mapping[str, Any], rendered: Mapping[str, Any]) -> bool:
    """Ports that server-side apply would leave in place."""
    want = {(p["port"], p["protocol"]) for p in rendered["spec"]["ports"]}
    have = (live.get("spec") or {}).get("ports") or ()
    return any((p.get("port"), p.get("protocol", "TCP")) not in want for p in have)


def _ports(spec: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        tuple(port.get(field, "TCP" if field == "protocol" else None) for field in _PORT_FIELDS)
        for port in spec.get("ports") or ()
    ]
