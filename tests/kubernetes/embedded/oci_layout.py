"""One image as a folder of blobs, in which a layer that did not change is never written again.

buildah compresses what it pushes and recognises only uncompressed layers that it finds. So each
layer is kept uncompressed, under the digest that it has in every image with the same content: then
a push, and a node that has the layer too, pass over it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedded.errors import ClusterError

REFERENCE = "org.opencontainers.image.ref.name"
GZIP = "+gzip"


@dataclass(frozen=True)
class Layout:
    """An OCI image layout that holds one image at a time."""

    folder: Path

    def unpack(self, reference: str) -> None:
        """Keeps the named image, uncompressed, and nothing else."""
        index = self._read_index()
        found = [
            entry
            for entry in index["manifests"]
            if entry.get("annotations", {}).get(REFERENCE) == reference
        ]
        if len(found) != 1:
            raise ClusterError(f"{self.folder} holds {len(found)} images {reference!r}")
        manifest = json.loads(self._blob(found[0]["digest"]).read_text())
        config = json.loads(self._blob(manifest["config"]["digest"]).read_text())
        manifest["layers"] = [
            self._unpack_layer(layer, digest)
            for layer, digest in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True)
        ]
        content = json.dumps(manifest).encode()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self._blob(digest).write_bytes(content)
        entry = {**found[0], "digest": digest, "size": len(content)}
        (self.folder / "index.json").write_text(json.dumps({**index, "manifests": [entry]}))
        self._keep([digest, *_digests(manifest)])

    def write_archive(self, archive: Path, present: Iterable[str]) -> None:
        """The image as an archive without the layers that are `present` where it goes."""
        (entry,) = self._read_index()["manifests"]
        manifest = json.loads(self._blob(entry["digest"]).read_text())
        known = set(present) - {entry["digest"], manifest["config"]["digest"]}
        with tarfile.open(archive, "w") as tar:
            for name in ("oci-layout", "index.json"):
                tar.add(self.folder / name, name)
            for digest in dict.fromkeys([entry["digest"], *_digests(manifest)]):
                if digest not in known:
                    tar.add(self._blob(digest), f"blobs/sha256/{self._blob(digest).name}")

    def _unpack_layer(self, layer: dict[str, Any], digest: str) -> dict[str, Any]:
        target = self._blob(digest)
        if layer["mediaType"].endswith(GZIP):
            packed = self._blob(layer["digest"])
            unfinished = target.with_suffix(".unfinished")
            with gzip.open(packed) as source, unfinished.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            unfinished.rename(target)
        media_type = layer["mediaType"].removesuffix(GZIP)
        return {"mediaType": media_type, "digest": digest, "size": target.stat().st_size}

    def _keep(self, digests: Iterable[str]) -> None:
        names = {digest.partition(":")[2] for digest in digests}
        for blob in (self.folder / "blobs" / "sha256").iterdir():
            if blob.name not in names:
                blob.unlink()

    def _read_index(self) -> dict[str, Any]:
        index: dict[str, Any] = json.loads((self.folder / "index.json").read_text())
        return index

    def _blob(self, digest: str) -> Path:
        return self.folder / "blobs" / "sha256" / digest.partition(":")[2]


def _digests(manifest: dict[str, Any]) -> list[str]:
    return [item["digest"] for item in [manifest["config"], *manifest["layers"]]]
