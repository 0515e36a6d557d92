"""Reads `spec.model.uri`. Knows the forms; the CRD's rules refuse all others before."""

from __future__ import annotations

from dataclasses import dataclass

from tpinference_operator.errors import InvalidSpec

MOUNT_ROOT = "/models"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where the engine finds the model, and which claim must be mounted for it."""

    directory: str
    claim: str | None

    @property
    def mount_path(self) -> str:
        return f"{MOUNT_ROOT}/{self.claim}"


def parse_model_uri(uri: str) -> ModelSource:
    scheme, found, rest = uri.partition("://")
    if found and scheme == "file" and rest.startswith("/"):
        return ModelSource(directory=rest, claim=None)
    if found and scheme == "pvc" and rest.partition("/")[0]:
        claim, _, path = rest.rstrip("/").partition("/")
        directory = f"{MOUNT_ROOT}/{claim}/{path}" if path else f"{MOUNT_ROOT}/{claim}"
        return ModelSource(directory=directory, claim=claim)
    raise InvalidSpec(
        (f"spec.model.uri is {uri!r}, allowed are pvc://<claim>/<path> and file:///<path>",)
    )
