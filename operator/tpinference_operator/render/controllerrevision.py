"""The ControllerRevision that keeps a revision: the spec as it was, and its rendering."""

from __future__ import annotations

from typing import Any

from tpinference_operator import names
from tpinference_operator.render.raycluster import Owner
from tpinference_operator.revision import Revision


def render_controllerrevision(revision: Revision, owner: Owner, *, number: int) -> dict[str, Any]:
    """Before: `number` is above that of every stored revision of this owner."""
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": names.revision_name(owner.name, revision.hash8),
            "namespace": owner.namespace,
            "labels": {**names.child_labels(owner.name), names.REVISION_LABEL: revision.hash8},
            "ownerReferences": [owner.reference()],
        },
        "revision": number,
        "data": {"spec": revision.spec, "rayCluster": revision.ray_cluster},
    }
