"""The few core/v1 types that a TPInference takes as they are, with Kubernetes' own names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tpinference_operator.api.base import ApiModel, Quantity

Name = Annotated[str, Field(min_length=1, max_length=253)]
Label = Annotated[str, Field(max_length=63)]
QualifiedName = Annotated[str, Field(min_length=1, max_length=317)]

Resources = Annotated[dict[QualifiedName, Quantity], Field(max_length=32)]


class ResourceRequirements(ApiModel):
    """Requests and limits of one container."""

    requests: Resources = {}
    """What the scheduler reserves."""
    limits: Resources = {}
    """What the container may use at most."""


class Toleration(ApiModel):
    """Lets a pod onto nodes with a matching taint."""

    key: Annotated[str, Field(max_length=317)] | None = None
    """Taint key; absent with operator Exists means every key."""
    operator: Literal["Exists", "Equal"] | None = None
    """Equal when absent."""
    value: Label | None = None
    """Taint value, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Every effect when absent."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """How long a NoExecute taint is tolerated; for ever when absent."""


class KeyRef(ApiModel):
    """One key of a Secret or a ConfigMap."""

    name: Name
    """Name of the object."""
    key: Name
    """Key in its data."""
    optional: bool | None = None
    """Start without the variable when the key is absent."""


class FieldRef(ApiModel):
    """A field of the pod itself."""

    api_version: Annotated[str, Field(max_length=63)] | None = None
    """Of fieldPath; v1 when absent."""
    field_path: Name
    """Such as metadata.name."""


class ResourceFieldRef(ApiModel):
    """A request or limit of a container."""

    container_name: Name | None = None
    """The engine's container when absent."""
    resource: QualifiedName
    """Such as limits.memory."""
    divisor: Quantity | None = None
    """Unit of the value."""


class EnvVarSource(ApiModel):
    """Where a value comes from."""

    secret_key_ref: KeyRef | None = None
    """A key of a Secret in the namespace."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap in the namespace."""
    field_ref: FieldRef | None = None
    """A field of the pod."""
    resource_field_ref: ResourceFieldRef | None = None
    """A request or limit."""


class EnvVar(ApiModel):
    """One environment variable."""

    name: Name
    """Name of the variable."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Its value; `$(OTHER)` is replaced by the kubelet."""
    value_from: EnvVarSource | None = None
    """Its source, instead of a value."""
