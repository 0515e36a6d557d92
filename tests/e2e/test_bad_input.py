"""What is wrong reaches a condition, in the words of the cluster or the engine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from embedded.serving import Serving
from harness.lag import LagMeter

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

# For what the cluster and the engine take to find out, on two busy cores.
CLUSTER_TIMEOUT_S = 60
ENGINE_TIMEOUT_S = 240

PULL_REASONS = ("ErrImagePull", "ImagePullBackOff")

Make = Callable[[Callable[[dict[str, Any]], None]], Serving]
OfferFolder = Callable[[Path], str]


def scheduler_said(served: Serving, word: str) -> bool:
    """Whether a pod's own conditions say that no node is found, and why."""
    conditions = [
        condition
        for pod in served.pods("head") + served.pods("worker")
        for condition in pod["status"].get("conditions", [])
    ]
    return any(c["type"] == "PodScheduled" and word in c.get("message", "") for c in conditions)


def kubelet_said(served: Serving) -> bool:
    waiting = [
        status["state"].get("waiting", {}).get("reason")
        for pod in served.pods("head") + served.pods("worker")
        for key in ("initContainerStatuses", "containerStatuses")
        for status in pod["status"].get(key, [])
    ]
    return any(reason in PULL_REASONS for reason in waiting)


def engine_said(served: Serving) -> bool:
    """Whether the head pod's admin port says it."""
    try:
        return bool(served.engine_status()["state"] == "failed")
    except (OSError, KeyError, ValueError):
        return False


def test_an_image_that_can_not_be_pulled(
    make: Make, model: Path, offer_folder: OfferFolder, measure_lag: LagMeter
) -> None:
    image = "registry.invalid/no/such/image:1"
    claim = offer_folder(model)

    def change(spec: dict[str, Any]) -> None:
        spec["model"]["uri"] = f"pvc://{claim}"
        spec.setdefault("engine", {})["image"] = image

    served = make(change)
    seen = measure_lag(
        "an image that can't be pulled",
        sign=lambda: kubelet_said(served),
        told=lambda: served.find_condition("Ready", "False", "ImagePullFailed"),
        timeout_s=CLUSTER_TIMEOUT_S,
        describe=served.explain,
    )
    assert image in seen["message"]


def test_a_claim_that_does_not_exist(make: Make, measure_lag: LagMeter) -> None:
    def change(spec: dict[str, Any]) -> None:
        spec["model"]["uri"] = "pvc://no-such-claim/model"

    served = make(change)
    seen = measure_lag(
        "a claim that does not exist",
        sign=lambda: scheduler_said(served, "no-such-claim"),
        told=lambda: served.find_condition("Ready", "False", "VolumeNotReady"),
        timeout_s=CLUSTER_TIMEOUT_S,
        describe=served.explain,
    )
    assert "no-such-claim" in seen["message"]


def test_more_memory_than_any_node_has(
    make: Make, model: Path, offer_folder: OfferFolder, measure_lag: LagMeter
) -> None:
    claim = offer_folder(model)

    def change(spec: dict[str, Any]) -> None:
        spec["model"]["uri"] = f"pvc://{claim}"
        spec["workers"]["resources"] = {"requests": {"memory": "4Ti"}}

    served = make(change)
    seen = measure_lag(
        "more memory than any node has",
        sign=lambda: scheduler_said(served, "Insufficient memory"),
        told=lambda: served.find_condition("Ready", "False", "Unschedulable"),
        timeout_s=CLUSTER_TIMEOUT_S,
        describe=served.explain,
    )
    assert "Insufficient memory" in seen["message"]


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def of_an_unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(architectures=["AbacusForCausalLM"], model_type="abacus")
    (folder / "config.json").write_text(json.dumps(config))


def with_truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()[: 4 << 20]
    weights.unlink()
    weights.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (without_config, "config.json"),
        (of_an_unknown_architecture, "AbacusForCausalLM"),
        (with_truncated_weights, "model.safetensors"),
    ],
)
def test_a_model_directory_that_can_not_be_served(
    make: Make,
    offer_folder: OfferFolder,
    damaged_copy: Callable[[Callable[[Path], None]], Path],
    damage: Callable[[Path], None],
    word: str,
    measure_lag: LagMeter,
) -> None:
    claim = offer_folder(damaged_copy(damage))

    def change(spec: dict[str, Any]) -> None:
        spec["model"]["uri"] = f"pvc://{claim}"

    served = make(change)
    seen = measure_lag(
        f"a model directory {damage.__name__}",
        sign=lambda: engine_said(served),
        told=lambda: served.find_condition("Ready", "False", "InvalidModel"),
        timeout_s=ENGINE_TIMEOUT_S,
        describe=served.explain,
    )
    assert word in seen["message"]
    assert served.condition("Stalled")["status"] == "True"
    # Left standing for a look: nothing ended and nothing was replaced. Workers may still be on
    # their way, since the head reads the directory first.
    phases = [pod["status"]["phase"] for pod in served.pods("head") + served.pods("worker")]
    assert len(phases) == 3
    assert set(phases) <= {"Running", "Pending"}


@pytest.fixture
def damaged_copy(model: Path, tmp_path: Path) -> Callable[[Callable[[Path], None]], Path]:
    """A copy of the model after a change, readable for the engine's user."""

    def make_copy(damage: Callable[[Path], None]) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(model, folder, copy_function=_link_or_copy)
        folder.chmod(0o755)
        damage(folder)
        return folder

    return make_copy


def _link_or_copy(source: str, target: str) -> None:
    """Weights are large and damaged only after an unlink; all else is small."""
    if not source.endswith(".safetensors"):
        shutil.copyfile(source, target)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
