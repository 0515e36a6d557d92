"""buildah with a storage of its own, so that the machine's images stay as they are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from embedded.command import run
from embedded.places import cache_dir

BUILD_TIMEOUT_S = 3600.0
COMMAND_TIMEOUT_S = 600.0
CERTIFICATES = Path("/etc/ssl/certs")
# Settings of this machine's pip that hold inside a build too.
PIP_SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PIP_DEFAULT_TIMEOUT")


def buildah(*arguments: str | Path, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    storage = cache_dir() / "buildah"
    storage.mkdir(parents=True, exist_ok=True)
    places = ["--root", str(storage / "storage"), "--runroot", str(storage / "run")]
    return run(["nice", "buildah", *places, *arguments], timeout_s=timeout_s).strip()


def has_image(reference: str) -> bool:
    listed = buildah("images", "--format", "{{.Name}}:{{.Tag}}").splitlines()
    return reference in listed


def build(
    dockerfile: Path,
    context: Path,
    *,
    base: str,
    pins: Sequence[str] = (),
    wheels: Path | None = None,
) -> str:
    """Builds a Dockerfile and answers with the image's id. Unchanged layers are reused."""
    arguments: dict[str, str] = {"BASE": base, **pip_settings(os.environ)}
    volumes = [f"{CERTIFICATES}:{CERTIFICATES}:ro"] if CERTIFICATES.is_dir() else []
    if wheels is not None:
        volumes.append(f"{wheels}:/wheels:ro")
        arguments["PIP_FIND_LINKS"] = "/wheels"
    if pins:
        arguments["PINS"] = " ".join(pins)
    return buildah(
        *("build", "--quiet", "--layers", "--network", "host", "--isolation", "chroot"),
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        *(f"--volume={volume}" for volume in volumes),
        *("--file", dockerfile, context),
        timeout_s=BUILD_TIMEOUT_S,
    )


def pip_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in PIP_SETTINGS if environment.get(name)}
