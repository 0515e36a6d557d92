"""The project's images, from its own Dockerfiles, and their way to a node without a registry."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from embedded.base_image import ensure_base_image
from embedded.buildah import build, buildah
from embedded.lock import locked
from embedded.node import Node
from embedded.packages import ensure_packages
from embedded.places import REPOSITORY, cache_dir, wheels_dir
from embedded.progress import step

OPERATOR = "localhost/tpinference-operator"
ENGINE = "localhost/tpinference-engine"
ID_LENGTH = 12
# The examples for a machine without a registry name their image so: the one loaded last.
DEV_TAG = "dev"


@dataclass(frozen=True)
class Image:
    """A built image. Its tag is its id, so an image of other content has another name."""

    name: str
    image_id: str

    @property
    def tag(self) -> str:
        return self.image_id[:ID_LENGTH]

    @property
    def reference(self) -> str:
        return f"{self.name}:{self.tag}"


@dataclass(frozen=True)
class Images:
    operator: Image
    engine: Image


def build_images() -> Images:
    """Both images of the sources as they are now."""
    ensure_packages()
    base = ensure_base_image()
    with step("build the operator's image"):
        operator = build(REPOSITORY / "Dockerfile", REPOSITORY, base=base)
    wheels = wheels_dir()
    pins = [] if wheels is None else pins_of(path.name for path in wheels.glob("*.whl"))
    torch = ", ".join(pins) or "torch for CUDA, a download of about 3 GB"
    with step(f"build the engine's image ({torch})"):
        dockerfile = REPOSITORY / "worker_image" / "Dockerfile"
        engine = build(dockerfile, REPOSITORY, base=base, pins=pins, wheels=wheels)
    return Images(Image(OPERATOR, operator), Image(ENGINE, engine))


def load_image(node: Node, image: Image) -> None:
    """Gives a node an image, also as `:dev`. Layers that the node has are not sent again."""
    if image.reference not in node.ctr("images", "ls", "-q").split():
        with step(f"load {image.reference} into {node.name}"):
            _send(node, image)
    node.ctr("images", "tag", "--force", image.reference, f"{image.name}:{DEV_TAG}")


def _send(node: Node, image: Image) -> None:
    layout = cache_dir() / "oci" / image.name.rpartition("/")[2]
    with locked(layout):
        target = f"oci:{layout}:{image.reference}"
        # Only layers that no earlier push has left in the layout are compressed and written.
        buildah("push", "--quiet", image.image_id, target)
        archive = node.folder / f"{image.tag}.tar"
        write_archive(archive, layout, image.reference, node.ctr("content", "ls", "-q").split())
        node.import_image(archive)
        archive.unlink()


def pins_of(wheel_names: Iterable[str]) -> list[str]:
    """Requirements that select exactly these wheels: a newer release must not win over them."""
    matches = [re.match(r"([^-]+)-([^-]+)-", name) for name in sorted(wheel_names)]
    return [f"{match[1]}=={match[2]}" for match in matches if match]


def write_archive(archive: Path, layout: Path, reference: str, present: Iterable[str]) -> None:
    """One image of an OCI layout as an archive, without the blobs that are present already."""
    index = json.loads((layout / "index.json").read_text())
    name = "org.opencontainers.image.ref.name"
    (manifest,) = (
        entry for entry in index["manifests"] if entry.get("annotations", {}).get(name) == reference
    )
    blobs = layout / "blobs" / "sha256"
    content = json.loads((blobs / manifest["digest"].partition(":")[2]).read_text())
    small = [manifest, content["config"]]
    layers = [layer for layer in content["layers"] if layer["digest"] not in set(present)]
    own_index = archive.with_suffix(".index.json")
    own_index.write_text(json.dumps({**index, "manifests": [manifest]}))
    with tarfile.open(archive, "w") as tar:
        tar.add(layout / "oci-layout", "oci-layout")
        tar.add(own_index, "index.json")
        for digest in dict.fromkeys(item["digest"].partition(":")[2] for item in small + layers):
            tar.add(blobs / digest, f"blobs/sha256/{digest}")
    own_index.unlink()
