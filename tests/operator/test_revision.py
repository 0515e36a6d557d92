"""What makes a revision, and what must not make one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from harness.plan_world import DEFAULTS, OWNER

from tpinference_operator import names
from tpinference_operator.api.v1alpha1 import TPInferenceSpec
from tpinference_operator.errors import CorruptRevision
from tpinference_operator.observe import observe
from tpinference_operator.observed import Children, KubeRay, SeenRevision
from tpinference_operator.render.controllerrevision import render_controllerrevision
from tpinference_operator.render.raycluster import Defaults, render_raycluster
from tpinference_operator.revision import (
    Revision,
    is_revision_of,
    make_revision,
    parse_revision,
    rolling_part,
)

Body = dict[str, Any]
MakeTpi = Callable[..., Body]
MakeSpec = Callable[..., TPInferenceSpec]


def revise(spec: TPInferenceSpec, defaults: Defaults = DEFAULTS) -> Revision:
    return make_revision(spec, render_raycluster(spec, "llm", defaults))


def test_live_fields_are_not_part_of_a_revision(make_spec: MakeSpec) -> None:
    changed = make_spec(replicas=5, service={"port": 80, "type": "NodePort"})
    assert is_revision_of(revise(make_spec()), changed)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"uri": "pvc://models/other"}},
        {"engine": {"image": "other"}},
        {"engine": {"env": [{"name": "A", "value": "b"}]}},
        {"parallelism": {"tensor": 4}},
        {"workers": {"resources": {"limits": {"memory": "1Gi"}}}},
        {"healthCheck": {"canary": {"intervalSeconds": 9}}},
        {"updateStrategy": {"drainSeconds": 5}},
    ],
    ids=str,
)
def test_a_field_that_rolls_makes_another_revision(make_spec: MakeSpec, change: Body) -> None:
    stored, changed = revise(make_spec()), make_spec(**change)
    assert not is_revision_of(stored, changed)
    assert revise(changed).hash8 != stored.hash8


def test_a_default_written_out_is_the_same_revision(make_spec: MakeSpec) -> None:
    assert is_revision_of(revise(make_spec()), make_spec(engine={"maxNumSeqs": 256}))


def test_a_field_that_the_stored_one_lacks_counts_as_its_default(make_spec: MakeSpec) -> None:
    """As written by an operator that did not know engine.dtype and healthCheck yet."""
    stored = revise(make_spec())
    old = copy.deepcopy(dict(stored.spec))
    del old["engine"]["dtype"], old["healthCheck"]
    older = Revision(hash8="abc", spec=old, ray_cluster=stored.ray_cluster)
    assert is_revision_of(older, make_spec())
    assert not is_revision_of(older, make_spec(engine={"dtype": "Float16"}))


def test_another_rendering_or_default_image_is_the_same_revision(make_spec: MakeSpec) -> None:
    spec = make_spec()
    stored = revise(spec, Defaults(image="example.test/engine:0", ray_version="2.52.0"))
    assert is_revision_of(stored, spec)
    assert stored.hash8 != revise(spec).hash8


def test_a_stored_spec_out_of_todays_bounds_equals_nothing(make_spec: MakeSpec) -> None:
    wide = {**rolling_part(make_spec()), "parallelism": {"tensor": 100000}}
    assert not is_revision_of(Revision(hash8="a", spec=wide, ray_cluster={}), make_spec())


def test_the_stored_spec_has_no_live_field(make_spec: MakeSpec) -> None:
    assert {"replicas", "service"} & rolling_part(make_spec()).keys() == set()


def seen(owner: Body, manifest: Body) -> SeenRevision:
    stored = {**manifest, "metadata": {**manifest["metadata"], "uid": "u"}}
    children = Children(revisions=(stored,))
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return observe(owner, children, kuberay=KubeRay.SERVED, now=now).revisions[0]


def test_a_revision_is_the_same_after_being_stored(make_tpi: MakeTpi, make_spec: MakeSpec) -> None:
    revision = revise(make_spec())
    manifest = render_controllerrevision(revision, OWNER, number=1)
    assert manifest["metadata"]["name"] == f"llm-{revision.hash8}"
    assert parse_revision(seen(make_tpi(), manifest)) == revision


@pytest.mark.parametrize("label", [None, "00000000"])
def test_a_revision_is_known_by_its_name_whatever_its_label_says(
    make_tpi: MakeTpi, make_spec: MakeSpec, label: str | None
) -> None:
    revision = revise(make_spec())
    manifest = render_controllerrevision(revision, OWNER, number=1)
    manifest["metadata"]["labels"][names.REVISION_LABEL] = label
    assert parse_revision(seen(make_tpi(), manifest)) == revision


@pytest.mark.parametrize("spoil", ["name", "spec", "rayCluster"])
def test_a_spoilt_revision_is_named(make_tpi: MakeTpi, make_spec: MakeSpec, spoil: str) -> None:
    manifest = render_controllerrevision(revise(make_spec()), OWNER, number=1)
    if spoil == "name":
        manifest["metadata"]["name"] = "llm-copy"
    else:
        manifest["data"] = {k: v for k, v in manifest["data"].items() if k != spoil}
    with pytest.raises(CorruptRevision, match=manifest["metadata"]["name"]):
        parse_revision(seen(make_tpi(), manifest))
