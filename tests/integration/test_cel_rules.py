"""Every rule of the CRD on a real API server: one object it accepts, one it refuses by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from embedded.control_plane import ControlPlane
from embedded.errors import CommandFailed
from harness.merge import merge

ROOT = Path(__file__).resolve().parents[2]
CASES: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "tests" / "contract" / "cel_cases.yaml").read_text()
)

Create = Callable[[dict[str, Any]], str]


@pytest.fixture
def dry_create(control_plane: ControlPlane, make_tpi: Callable[..., dict[str, Any]]) -> Create:
    """What the API server says to a small object with this patch, which is not stored."""

    def create(patch: dict[str, Any]) -> str:
        body = make_tpi(patch.get("name", "llm"))
        body["spec"] = merge(body["spec"], patch.get("spec", {}))
        said = control_plane.kubectl(
            "create", "--dry-run=server", "--namespace=default", "-f", "-", stdin=json.dumps(body)
        )
        return said

    return create


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["rule"])
def test_rule_accepts_what_it_should(dry_create: Create, case: dict[str, Any]) -> None:
    assert "created" in dry_create(case["accept"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["rule"])
def test_rule_refuses_by_the_fields_name(dry_create: Create, case: dict[str, Any]) -> None:
    with pytest.raises(CommandFailed) as caught:
        dry_create(case["reject"])
    assert case["rule"] in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_example_is_accepted_by_strict_validation(
    control_plane: ControlPlane, path: Path
) -> None:
    control_plane.kubectl(
        "create", "--dry-run=server", "--validate=strict", "--namespace=default", "-f", path
    )


def test_an_unknown_field_is_refused_by_strict_validation(
    control_plane: ControlPlane, make_tpi: Callable[..., dict[str, Any]]
) -> None:
    body = make_tpi(parallelism={"tensor": 2, "gpusPerNode": 1, "tensorParalelSize": 2})
    with pytest.raises(CommandFailed, match="tensorParalelSize"):
        control_plane.kubectl(
            "create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(body)
        )
