"""`make demo`: from nothing to one answered question, on this machine alone."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from embedded import model_volume
from embedded.cluster import attach, take_down
from embedded.errors import ClusterError
from embedded.images import Image
from embedded.installation import Installation, ensure_installation
from embedded.places import REPOSITORY
from embedded.progress import format_seconds, say, step
from embedded.serving import Serving
from embedded.tools import tool_path

EXAMPLE = REPOSITORY / "examples" / "smollm2-cpu.yaml"
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class Example:
    """An example manifest and what it needs around it."""

    name: str
    namespace: str
    claim: str
    # The model's place inside the claim.
    subpath: str


def run_demo(root: Path | None = None) -> None:
    started = time.monotonic()
    with step("make the model"):
        model = model_volume.make_model()
    installed = ensure_installation(root)
    serving = apply_example(installed, model)
    with step(f"wait for {serving.name} to be Ready"):
        serving.wait_until_ready(lambda news: say(f"    {news}"))
    with step("ask it a question over its Service"):
        answer = serving.ask(QUESTION)
    say(f"\n  > {QUESTION}\n  {answer}\n")
    say(serving.kubectl("get", "tpi", "-n", serving.namespace, "-o", "wide"))
    say(f"all of it took {format_seconds(time.monotonic() - started)}\n")
    say(how_to_go_on(serving))


def apply_example(installed: Installation, model: Path, path: Path = EXAMPLE) -> Serving:
    """Applies an example as a user would, next to a claim that holds the model."""
    example = read_example(path)
    kubectl = installed.cluster.kubectl
    serving = Serving(kubectl, example.name, example.namespace)
    if outdated(serving, installed.images.engine):
        with step(f"remove {example.name}, which runs an older image of the engine"):
            kubectl("delete", "tpinference", example.name, "-n", example.namespace)
    with step(f"apply {path.name}"):
        folder = claim_folder(model, example.subpath)
        model_volume.offer(kubectl, folder, claim=example.claim, namespace=example.namespace)
        kubectl("apply", "-n", example.namespace, "-f", path)
    return serving


def outdated(serving: Serving, image: Image) -> bool:
    """A pod keeps its image when the tag moves on, and so would the demo show old sources."""
    for pod in serving.pods("head") + serving.pods("worker"):
        for container in pod["status"].get("containerStatuses", []):
            if container["imageID"] not in ("", f"sha256:{image.image_id}"):
                return True
    return False


def remove_demo(root: Path | None = None) -> None:
    """Leaves nothing on this machine but the cache, and says where that is."""
    if attach(root) is None:
        say("no running cluster; removing what may be left of one")
    take_down(root)


def read_example(path: Path) -> Example:
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    found: list[dict[str, Any]] = [each for each in documents if each["kind"] == "TPInference"]
    if len(found) != 1:
        raise ClusterError(f"{path.name} holds {len(found)} TPInferences, expected one")
    scheme, _, rest = str(found[0]["spec"]["model"]["uri"]).partition("://")
    if scheme != "pvc":
        raise ClusterError(f"the model of {path.name} is not in a claim: {scheme}://{rest}")
    claim, _, subpath = rest.partition("/")
    metadata = found[0]["metadata"]
    return Example(metadata["name"], metadata.get("namespace", "default"), claim, subpath)


def claim_folder(model: Path, subpath: str) -> Path:
    """The folder that must be the claim's root for the model to lie at `subpath` in it."""
    parts = Path(subpath).parts
    if parts != model.parts[len(model.parts) - len(parts) :]:
        raise ClusterError(f"the example looks for the model at {subpath!r}, it is in {model}")
    return Path(*model.parts[: len(model.parts) - len(parts)])


def how_to_go_on(serving: Serving) -> str:
    messages = [{"role": "user", "content": "Who are you?"}]
    body = json.dumps({"model": serving.name, "messages": messages})
    return f"""\
How to go on:
  export KUBECONFIG={serving.kubectl.kubeconfig}
  alias kubectl={tool_path("kubectl")}
  kubectl get tpi,raycluster,pods,service -n {serving.namespace}
  kubectl describe tpi {serving.name} -n {serving.namespace}
  curl {serving.service_url()}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'
  make demo-down      # removes the cluster and leaves nothing behind but the cache"""
