"""The project's images, from its own Dockerfiles, and their way to a node without a registry."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from embedded.base_image import ensure_base_image
from embedded.buildah import build, buildah
from embedded.lock import locked
from embedded.node import Node
from embedded.oci_layout import Layout
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
    layout = Layout(cache_dir() / "oci" / image.name.rpartition("/")[2])
    with locked(layout.folder):
        buildah("push", "--quiet", image.image_id, f"oci:{layout.folder}:{image.reference}")
        layout.unpack(image.reference)
        archive = node.folder / f"{image.tag}.tar"
        layout.write_archive(archive, present=node.ctr("content", "ls", "-q").split())
        node.import_image(archive)
        archive.unlink()


def pins_of(wheel_names: Iterable[str]) -> list[str]:
    """Requirements that select exactly these wheels: a newer release must not win over them."""
    matches = [re.match(r"([^-]+)-([^-]+)-", name) for name in sorted(wheel_names)]
    return [f"{match[1]}=={match[2]}" for match in matches if match]
