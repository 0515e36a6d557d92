"""A new version of the operator restarts nobody, however differently it would render today."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from embedded.wait import wait_for

import tpinference_operator

pytestmark = pytest.mark.timeout(180)

PACKAGE = Path(tpinference_operator.__file__).parent


@pytest.fixture
def make_version(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the operator in which texts of a file are replaced: the next release."""

    def make(file: str, old: str, new: str) -> Path:
        root = tmp_path / "next-version"
        shutil.copytree(PACKAGE, root / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        target = root / PACKAGE.name / file
        text = target.read_text()
        assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
        target.write_text(text.replace(old, new))
        return root

    return make


@pytest.fixture
def first_version(start_operator: Any, client: Any, make_tpi: Any) -> Callable[..., Any]:
    """A TPInference made Ready by today's version, which then ended; what there was."""

    def run(**spec: Any) -> Any:
        operator = start_operator("old").wait_acting()
        client.create("tpinferences", make_tpi(**spec))
        client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
        assert operator.stop() == 0
        return groups(client)

    return run


CHANGES = {
    "renders differently": (
        "render/pod.py",
        '"enableServiceLinks": False,',
        '"enableServiceLinks": False, "hostname": "new",',
    ),
    "knows one more field": (
        "api/v1alpha1.py",
        "    image_pull_policy: Annotated[PullPolicy, Effect.ROLLS]",
        '    fresh: Annotated[str, Effect.ROLLS] = "default"\n    """New."""\n'
        "    image_pull_policy: Annotated[PullPolicy, Effect.ROLLS]",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_version_restarts_no_group_and_new_groups_are_as_the_old(
    change: str,
    first_version: Callable[..., Any],
    make_version: Callable[..., Path],
    start_operator: Any,
    proxy: Any,
    client: Any,
) -> None:
    before = first_version()
    mark = proxy.mark()
    operator = start_operator("new", version=make_version(*CHANGES[change])).wait_acting()
    wait_for_looks(operator)
    assert groups(client) == before
    assert [str(s) for s in proxy.since(mark) if s.is_write and not s.is_lease] == []

    # A replica more is stamped from the stored rendering, not from today's.
    client.patch("tpinferences", "llm", {"spec": {"replicas": 2}})
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    old, new = sorted(client.list("rayclusters"), key=ordinal)
    assert template(new) == template(old)

    # A real change is rendered by the new version.
    client.patch("tpinferences", "llm", {"spec": {"replicas": 1, "engine": {"maxNumSeqs": 7}}})
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    (newest,) = client.list("rayclusters")
    assert ("hostname" in template(newest)["spec"]) == (change == "renders differently")


def test_another_default_image_restarts_no_group(
    start_operator: Any, client: Any, make_tpi: Any, proxy: Any
) -> None:
    operator = start_operator("old").wait_acting()
    client.create("tpinferences", make_tpi(engine={"device": "CPU"}))
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    operator.stop()
    before, mark = groups(client), proxy.mark()
    new = start_operator("new", default_engine_image="example.invalid/engine:2").wait_acting()
    wait_for_looks(new)
    assert groups(client) == before
    assert [str(s) for s in proxy.since(mark) if s.is_write and not s.is_lease] == []


def wait_for_looks(operator: Any) -> None:
    name = "tpinference_operator_reconcile_seconds_count"
    wait_for("three looks", lambda: operator.metric(name) > 3, timeout_s=60)


def groups(client: Any) -> dict[str, str]:
    return {k: v for k, v in client.snapshot().items() if not k.startswith("pods/")}


def template(cluster: Any) -> Any:
    """A head template without what says which incarnation it is."""
    found = cluster["spec"]["headGroupSpec"]["template"]
    (container,) = found["spec"]["containers"]
    container["env"] = [e for e in container["env"] if not e["name"].startswith("TPINFERENCE_E")]
    for label in ("epoch", "ordinal"):
        found["metadata"]["labels"].pop(f"serving.tpinference.dev/{label}")
    return found


def ordinal(cluster: Any) -> str:
    return str(cluster["metadata"]["labels"]["serving.tpinference.dev/ordinal"])
