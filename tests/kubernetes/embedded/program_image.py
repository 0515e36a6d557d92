"""Packs one static program into an image archive. Nothing is built or run for it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

from embedded.places import go_architecture


@dataclass(frozen=True)
class ProgramImage:
    """An image that holds a program, as /<its name>, and nothing else."""

    reference: str
    program: Path
    user: str = "65532:65532"

    def write(self, archive: Path) -> Path:
        """The image in the format of `docker save`, which containerd imports."""
        layer = self._layer()
        digest = hashlib.sha256(layer).hexdigest()
        config = json.dumps(
            {
                "architecture": go_architecture(),
                "os": "linux",
                "config": {"Entrypoint": [f"/{self.program.name}"], "User": self.user},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            }
        ).encode()
        config_name = f"{hashlib.sha256(config).hexdigest()}.json"
        layer_name = f"{digest}.tar"
        manifest = [{"Config": config_name, "RepoTags": [self.reference], "Layers": [layer_name]}]
        unfinished = archive.with_suffix(".unfinished")
        with tarfile.open(unfinished, "w") as tar:
            _add(tar, config_name, config)
            _add(tar, layer_name, layer)
            _add(tar, "manifest.json", json.dumps(manifest).encode())
        unfinished.rename(archive)
        return archive

    def _layer(self) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            _add(tar, self.program.name, self.program.read_bytes(), mode=0o755)
        return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))
