"""The spec of a TPInference. Each field says how a change takes effect (`Effect`).

Defaults here are part of the API: they never change within v1alpha1, because a stored revision
that lacks a field counts as having its default. Rules across fields are CEL, in `rules.py`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from tpinference_operator.api.base import ApiModel, Effect, Quantity, list_map
from tpinference_operator.api.core import (
    EnvVar,
    Label,
    Name,
    QualifiedName,
    ResourceRequirements,
    Toleration,
)

Seconds = Annotated[int, Field(ge=1, le=86400)]
Tokens = Annotated[int, Field(ge=1, le=16777216)]
ImageName = Annotated[str, Field(min_length=1, max_length=512)]
RayVersion = Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", max_length=32)]


class Device(StrEnum):
    """What a rank computes on."""

    CUDA = "CUDA"
    CPU = "CPU"


class Dtype(StrEnum):
    """Type of weights and activations."""

    AUTO = "Auto"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"
    FLOAT32 = "Float32"


class PullPolicy(StrEnum):
    """When the kubelet pulls the image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ServiceType(StrEnum):
    """Types of Service that reach pods."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class ModelSpec(ApiModel):
    """Which model is served."""

    uri: Annotated[str, Effect.ROLLS, Field(min_length=1, max_length=1024)]
    """Where the Hugging Face directory lies: `pvc://claim/path` (mounted read-only) or
    `file:///path` (in the image)."""
    served_name: Annotated[Name | None, Effect.ROLLS] = None
    """The model id that clients send; the object's own name when absent."""


class CompiledGraphSpec(ApiModel):
    """Limits of the compiled Ray graph that every step goes through."""

    submit_timeout_seconds: Annotated[Seconds, Effect.ROLLS] = 60
    """How long a step may wait for a free slot in the graph."""
    get_timeout_seconds: Annotated[Seconds, Effect.ROLLS] = 300
    """How long a step may take before the group counts as lost."""
    teardown_timeout_seconds: Annotated[Seconds, Effect.ROLLS] = 30
    """How long the graph may take to end before ranks are killed."""
    buffer_size: Annotated[Quantity, Effect.ROLLS] = "1Mi"
    """Size of one channel buffer; a step's message must fit."""


class EngineSpec(ApiModel):
    """The program in the pods and how it computes."""

    image: Annotated[ImageName | None, Effect.ROLLS] = None
    """Image of head and workers; the operator's default when absent."""
    image_pull_policy: Annotated[PullPolicy, Effect.ROLLS] = PullPolicy.IF_NOT_PRESENT
    """When the kubelet pulls the image."""
    ray_version: Annotated[RayVersion | None, Effect.ROLLS] = None
    """Ray in the image, 2.52 or newer; that of the default image when absent."""
    device: Annotated[Device, Effect.ROLLS] = Device.CUDA
    """CUDA takes one GPU a rank. CPU takes none and communicates over gloo: for tests, small
    models and laptops."""
    dtype: Annotated[Dtype, Effect.ROLLS] = Dtype.AUTO
    """Auto is the type of the checkpoint."""
    max_model_len: Annotated[Tokens | None, Effect.ROLLS] = None
    """Tokens of prompt and output together; the model's own limit when absent."""
    max_num_seqs: Annotated[int, Effect.ROLLS, Field(ge=1, le=65536)] = 256
    """Requests in one step at most."""
    compiled_graph: CompiledGraphSpec = CompiledGraphSpec()
    extra_args: Annotated[
        list[Annotated[str, Field(max_length=1024)]], Effect.ROLLS, Field(max_length=64)
    ] = []
    """More arguments for the engine, verbatim. A flag that a field of the spec sets is refused."""
    env: Annotated[list[EnvVar], Effect.ROLLS, Field(max_length=64), list_map("name")] = []
    """More environment for both pods. A variable that the operator sets is refused."""


class ParallelismSpec(ApiModel):
    """How many ranks share the model. Nodes are derived: tensor ÷ gpusPerNode."""

    tensor: Annotated[int, Effect.ROLLS, Field(ge=1, le=1024)]
    """Ranks of one group; each holds a slice of every layer."""
    gpus_per_node: Annotated[int, Effect.ROLLS, Field(ge=1, le=16)] = 8
    """Most GPUs of one worker pod; on device CPU, most ranks of one worker pod."""

    @property
    def ranks_per_pod(self) -> int:
        return min(self.tensor, self.gpus_per_node)

    @property
    def nodes(self) -> int:
        """Whole pods; the CRD refuses a remainder."""
        return -(-self.tensor // self.gpus_per_node)


class HeadSpec(ApiModel):
    """The pod with the API server and the scheduler; it holds no rank."""

    resources: Annotated[ResourceRequirements, Effect.ROLLS] = ResourceRequirements()
    """Requests and limits of its container."""
    node_selector: Annotated[dict[QualifiedName, Label], Effect.ROLLS, Field(max_length=32)] = {}
    """Labels that its node must have."""
    tolerations: Annotated[list[Toleration], Effect.ROLLS, Field(max_length=32)] = []
    """Taints that its node may have."""


class WorkersSpec(HeadSpec):
    """The pods that hold the ranks, all alike."""

    gpu_resource_name: Annotated[QualifiedName, Effect.ROLLS] = "nvidia.com/gpu"
    """The resource of which each pod gets as many as it has ranks; unused on device CPU."""
    shm_size: Annotated[Quantity, Effect.ROLLS] = "16Gi"
    """Size of /dev/shm in both pods. It is memory: count it in limits."""


class CanarySpec(ApiModel):
    """One token through all ranks, again and again; what readiness stands on."""

    interval_seconds: Annotated[Seconds, Effect.ROLLS] = 15
    """Time between two canaries of an engine that is otherwise idle."""
    timeout_seconds: Annotated[Seconds, Effect.ROLLS] = 30
    """A slower canary has failed."""
    failure_threshold: Annotated[int, Effect.ROLLS, Field(ge=1, le=100)] = 3
    """Failures in a row before the group is not ready."""


class HealthCheckSpec(ApiModel):
    """When an engine counts as healthy."""

    startup_timeout_seconds: Annotated[Seconds, Effect.ROLLS] = 3600
    """From the engine's start to its first token. Pulling images and waiting for nodes is not
    counted."""
    canary: CanarySpec = CanarySpec()


class UpdateStrategySpec(ApiModel):
    """How groups are replaced when a field that rolls changes: one after the other."""

    drain_seconds: Annotated[int, Effect.ROLLS, Field(ge=0, le=86400)] = 60
    """How long running requests may take to finish before a group is deleted."""


class ServiceSpec(ApiModel):
    """The Service that clients talk to; it has the object's name."""

    type: Annotated[ServiceType, Effect.LIVE] = ServiceType.CLUSTER_IP
    """Type of the Service."""
    port: Annotated[int, Effect.LIVE, Field(ge=1, le=65535)] = 8000
    """Port of the OpenAI API."""


class TPInferenceSpec(ApiModel):
    """One model, served by `replicas` groups of `parallelism.tensor` ranks."""

    replicas: Annotated[int, Effect.LIVE, Field(ge=0, le=64)] = 1
    """Groups, each a RayCluster with an engine of its own."""
    model: ModelSpec
    engine: EngineSpec = EngineSpec()
    parallelism: ParallelismSpec
    head: HeadSpec = HeadSpec()
    workers: WorkersSpec = WorkersSpec()
    health_check: HealthCheckSpec = HealthCheckSpec()
    update_strategy: UpdateStrategySpec = UpdateStrategySpec()
    service: ServiceSpec = ServiceSpec()
