"""Image archives: what is in them, and what is left out because it is there already."""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from embedded.errors import ClusterError
from embedded.images import pins_of
from embedded.oci_layout import Layout
from embedded.program_image import ProgramImage


def add_blob(folder: Path, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    (folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (folder / "blobs" / "sha256" / digest).write_bytes(content)
    return f"sha256:{digest}"


def make_layout(folder: Path, reference: str, layers: list[bytes]) -> Layout:
    """A layout as buildah leaves it: each layer compressed, known by the compressed digest."""
    described: list[dict[str, Any]] = []
    for layer in layers:
        packed = gzip.compress(layer)
        kind = "application/vnd.oci.image.layer.v1.tar+gzip"
        digest = add_blob(folder, packed)
        described.append({"mediaType": kind, "digest": digest, "size": len(packed)})
    ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    config = json.dumps({"rootfs": {"diff_ids": ids}}).encode()
    manifest = {"config": {"digest": add_blob(folder, config)}, "layers": described}
    entry = {
        "digest": add_blob(folder, json.dumps(manifest).encode()),
        "annotations": {"org.opencontainers.image.ref.name": reference},
    }
    (folder / "oci-layout").write_text("{}")
    (folder / "index.json").write_text(json.dumps({"manifests": [entry]}))
    return Layout(folder)


def test_layers_are_kept_under_the_digest_of_their_content(tmp_path: Path) -> None:
    layout = make_layout(tmp_path, "x:1", [b"base", b"sources"])
    layout.unpack("x:1")
    names = {blob.name for blob in (tmp_path / "blobs" / "sha256").iterdir()}
    assert hashlib.sha256(b"base").hexdigest() in names
    assert hashlib.sha256(b"sources").hexdigest() in names
    assert len(names) == 4


def test_an_archive_leaves_out_the_layers_that_are_present(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "layout", "x:1", [b"base", b"sources"])
    layout.unpack("x:1")
    base, sources = (hashlib.sha256(layer).hexdigest() for layer in (b"base", b"sources"))
    layout.write_archive(tmp_path / "x.tar", present=[f"sha256:{base}"])
    with tarfile.open(tmp_path / "x.tar") as tar:
        names = tar.getnames()
    assert f"blobs/sha256/{sources}" in names
    assert f"blobs/sha256/{base}" not in names


def test_an_unknown_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="y:1"):
        make_layout(tmp_path, "x:1", [b"base"]).unpack("y:1")


def test_a_program_image_holds_the_program_alone(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_bytes(b"\x7fELF")
    archive = ProgramImage("localhost/pause:1", program).write(tmp_path / "pause.tar")
    with tarfile.open(archive) as tar:
        manifest = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
        layer = tarfile.open(fileobj=tar.extractfile(manifest[0]["Layers"][0]))
        members = [(member.name, member.mode) for member in layer.getmembers()]
    assert manifest[0]["RepoTags"] == ["localhost/pause:1"]
    assert members == [("pause", 0o755)]


def test_wheels_become_exact_requirements() -> None:
    wheel = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert pins_of([wheel]) == ["torch==2.13.0+cpu"]
