"""buildah with a storage of its own, so that the machine's images stay as they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from embedded.command import run
from embedded.lock import locked
from embedded.places import cache_dir

BUILD_TIMEOUT_S = 3600.0
COMMAND_TIMEOUT_S = 600.0
CERTIFICATES = Path("/etc/ssl/certs")
# Where it remembers which compressed layer belongs to which content; there is no flag for it.
FIXED_FOLDER = Path("/var/lib/containers")
BIND_AND_RUN = 'mount --bind "$1" "$2"; shift 2; exec "$@"'
# Settings of this machine's pip that hold inside a build too.
PIP_SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PIP_DEFAULT_TIMEOUT")


def buildah(*arguments: str | Path, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Runs buildah in a mount namespace of its own, where its fixed folders are in the cache."""
    folder = cache_dir() / "buildah"
    for name in ("storage", "run", "containers"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    settings = folder / "containers.conf"
    settings.write_text(f'[network]\nnetwork_config_dir = "{folder}/networks"\n')
    own = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
    enter = ("unshare", "--mount", "sh", "-ec", BIND_AND_RUN, "sh", folder / "containers")
    with locked(folder), _mount_point(FIXED_FOLDER):
        return run(
            [*enter, FIXED_FOLDER, "nice", "buildah", *own, *arguments],
            env={"CONTAINERS_CONF": str(settings)},
            timeout_s=timeout_s,
        ).strip()


@contextmanager
def _mount_point(path: Path) -> Iterator[None]:
    """The folder, only to mount something on it; removed again if it was not there before."""
    existed = path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if not existed:
            with suppress(OSError):  # somebody else has put something there
                path.rmdir()


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
    # What a build that was killed left: each layer is a container, of up to some GB.
    buildah("rm", "--all")
    return buildah(
        *("build", "--quiet", "--layers", "--network", "host", "--isolation", "chroot"),
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        *(f"--volume={volume}" for volume in volumes),
        *("--file", dockerfile, context),
        timeout_s=BUILD_TIMEOUT_S,
    )


def pip_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in PIP_SETTINGS if environment.get(name)}
