"""The demo's cluster for the e2e tests, and objects on it that each test changes and loses."""

from __future__ import annotations

import copy
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from embedded import cluster, model_volume, packages, tools
from embedded.demo import EXAMPLE, claim_folder, read_example
from embedded.installation import Installation, ensure_installation
from embedded.serving import Serving
from harness.lag import LagMeter

GONE_TIMEOUT = "150s"
# So little that a test's pods find a place beside those of any other TPInference.
SMALL = {"requests": {"cpu": "100m", "memory": "128Mi"}}

Change = Callable[[dict[str, Any]], None]
Make = Callable[..., Serving]
OfferFolder = Callable[[Path], str]


def obstacle() -> str | None:
    """Why these tests can't run here; None if they can."""
    return packages.missing_reason() or tools.missing_reason(tools.TOOLS)


@pytest.fixture(scope="session")
def installation() -> Iterator[Installation]:
    reason = obstacle()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    was_up = cluster.attach() is not None
    yield ensure_installation()
    if not was_up:
        cluster.take_down()


@pytest.fixture(scope="session")
def model(installation: Installation) -> Path:
    return model_volume.make_model()


@pytest.fixture(scope="session")
def restricted(installation: Installation) -> Iterator[str]:
    """A namespace that refuses every pod that does not keep to the strictest Pod Security level."""
    name = "e2e-restricted"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl = installation.cluster.kubectl
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    )
    yield name
    kubectl("delete", "namespace", name, f"--timeout={GONE_TIMEOUT}", timeout_s=180)


@pytest.fixture(scope="module")
def serving(installation: Installation, restricted: str, model: Path) -> Iterator[Serving]:
    """The example, Ready, in the restricted namespace."""
    example = read_example(EXAMPLE)
    kubectl = installation.cluster.kubectl
    folder = claim_folder(model, example.subpath)
    model_volume.offer(kubectl, folder, claim=example.claim, namespace=restricted)
    document = read_document()
    document["metadata"]["namespace"] = restricted
    kubectl("apply", "-f", "-", stdin=json.dumps(document))
    served = Serving(kubectl, example.name, restricted)
    served.wait_until_ready(print)
    yield served
    delete(served)


@pytest.fixture
def offer_folder(installation: Installation, restricted: str) -> Iterator[Callable[[Path], str]]:
    """Makes a folder the content of a new claim and answers with the claim's name."""
    kubectl = installation.cluster.kubectl
    claims: list[str] = []

    def offer(folder: Path) -> str:
        claims.append(f"e2e-{uuid.uuid4().hex[:8]}")
        model_volume.offer(kubectl, folder, claim=claims[-1], namespace=restricted)
        return claims[-1]

    yield offer
    for claim in claims:
        model_volume.withdraw(kubectl, claim=claim, namespace=restricted)


@pytest.fixture
def make(installation: Installation, restricted: str, offer_folder: OfferFolder) -> Iterator[Make]:
    """Applies the example under another name, small, with a change; removes it afterwards, and
    before the claims that its pods use."""
    made: list[Serving] = []

    def make_one(change: Change, name: str = "broken") -> Serving:
        document = read_document()
        document["metadata"].update(name=name, namespace=restricted)
        for part in ("head", "workers"):
            document["spec"].setdefault(part, {})["resources"] = copy.deepcopy(SMALL)
        change(document["spec"])
        kubectl = installation.cluster.kubectl
        kubectl("apply", "-f", "-", stdin=json.dumps(document))
        made.append(Serving(kubectl, name, restricted))
        return made[-1]

    yield make_one
    for each in made:
        delete(each)


@pytest.fixture
def measure_lag(capsys: pytest.CaptureFixture[str]) -> LagMeter:
    return LagMeter(capsys.disabled)


def read_document() -> dict[str, Any]:
    documents = yaml.safe_load_all(EXAMPLE.read_text())
    (document,) = (each for each in documents if each and each["kind"] == "TPInference")
    return dict(document)


def delete(served: Serving) -> None:
    """Returns once the object and its pods are gone."""
    where = ("-n", served.namespace)
    served.kubectl("delete", "tpinference", served.name, "--ignore-not-found", *where)
    served.kubectl(
        *("wait", "--for=delete", "pod", "-l", f"serving.tpinference.dev/name={served.name}"),
        *(*where, f"--timeout={GONE_TIMEOUT}"),
        timeout_s=180,
    )
