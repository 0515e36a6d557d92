"""Makes the base of both images, a minimal Debian 12 with Python, from Debian's packages alone.

The Dockerfiles' default base is the public image of the same release; no registry is needed here.
"""

from __future__ import annotations

import os

from embedded.buildah import buildah, has_image
from embedded.command import run
from embedded.places import cache_dir
from embedded.progress import step

SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
# Change the tag with the recipe: what is in the cache is found by it.
REFERENCE = f"localhost/debian:{SUITE}-python-1"
TIMEOUT_S = 900.0


def ensure_base_image() -> str:
    """The reference of the base image, which is made first if need be."""
    if has_image(REFERENCE):
        return REFERENCE
    with step(f"make the base image from Debian's {SUITE} packages"):
        archive = cache_dir() / "base" / f"{SUITE}.tar"
        archive.parent.mkdir(parents=True, exist_ok=True)
        unfinished = archive.with_name(f"unfinished-{os.getpid()}.tar")
        run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
            + [SUITE, str(unfinished)],
            timeout_s=TIMEOUT_S,
        )
        unfinished.rename(archive)
        container = buildah("from", "scratch")
        buildah("add", container, archive, "/")
        buildah("config", "--cmd", "/bin/bash", container)
        buildah("commit", "--quiet", "--rm", container, REFERENCE)
        archive.unlink()
    return REFERENCE
