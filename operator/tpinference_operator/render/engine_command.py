"""The seam to the engine: commands and environment of its containers.

`tests/contract` feeds what is rendered here to the engine's own parser. Nothing here depends on
ordinal or epoch: those arrive as environment when a group is stamped.
"""

from __future__ import annotations

from typing import Any

from tpinference_operator import names
from tpinference_operator.api.base import quantity_ceil
from tpinference_operator.api.v1alpha1 import Dtype, TPInferenceSpec
from tpinference_operator.model_uri import parse_model_uri

_PROGRAM = ["python3", "-m", "tpinference_engine"]

_DEFAULT_TOKEN_BUDGET = 2048

_DTYPES = {
    Dtype.AUTO: "auto",
    Dtype.BFLOAT16: "bfloat16",
    Dtype.FLOAT16: "float16",
    Dtype.FLOAT32: "float32",
}


def head_command(spec: TPInferenceSpec, name: str) -> list[str]:
    return [*_PROGRAM, "supervise", "--role", "head", "--", "serve", *_serve_arguments(spec, name)]


def worker_command() -> list[str]:
    return [*_PROGRAM, "supervise", "--role", "worker"]


def _serve_arguments(spec: TPInferenceSpec, name: str) -> list[str]:
    engine, canary = spec.engine, spec.health_check.canary
    flags: dict[str, str | int] = {
        "--served-model-name": spec.model.served_name or name,
        "--device": engine.device.lower(),
        "--dtype": _DTYPES[engine.dtype],
        "--tensor-parallel-size": spec.parallelism.tensor,
        "--ranks-per-node": spec.parallelism.ranks_per_pod,
        **({"--max-model-len": engine.max_model_len} if engine.max_model_len else {}),
        "--max-num-seqs": engine.max_num_seqs,
        **_token_budget(engine.max_num_seqs),
        "--distributed-executor-backend": "ray",
        "--step-transport": "compiled-graph",
        "--step-timeout": engine.compiled_graph.get_timeout_seconds,
        "--host": "0.0.0.0",
        "--port": names.API_PORT,
        "--admin-port": names.ADMIN_PORT,
        "--shutdown-timeout": spec.update_strategy.drain_seconds,
        "--startup-timeout": spec.health_check.startup_timeout_seconds,
        "--canary-interval": canary.interval_seconds,
        "--canary-timeout": canary.timeout_seconds,
        "--canary-failure-threshold": canary.failure_threshold,
    }
    rendered = [word for flag, value in flags.items() for word in (flag, str(value))]
    return [parse_model_uri(spec.model.uri).directory, *rendered, *engine.extra_args]


def _token_budget(max_num_seqs: int) -> dict[str, str | int]:
    """The engine's default, unless a full house needs more: one token each in a step."""
    if max_num_seqs <= _DEFAULT_TOKEN_BUDGET:
        return {}
    return {"--max-num-batched-tokens": max_num_seqs}


def environment(spec: TPInferenceSpec) -> list[dict[str, Any]]:
    """Of both pods: downward fields, Ray's settings, then `engine.env`."""
    graph = spec.engine.compiled_graph
    return [
        _downward("TPINFERENCE_POD_NAME", "metadata.name"),
        _downward("TPINFERENCE_NODE_NAME", "spec.nodeName"),
        _downward("TPINFERENCE_POD_IP", "status.podIP"),
        # The root file system is read-only; caches of torch and others go to the emptyDir.
        _plain("HOME", "/tmp"),
        # Ray reads these at import, so they can't be set by the engine.
        _plain("RAY_CGRAPH_submit_timeout", graph.submit_timeout_seconds),
        _plain("RAY_CGRAPH_get_timeout", graph.get_timeout_seconds),
        _plain("RAY_CGRAPH_teardown_timeout", graph.teardown_timeout_seconds),
        _plain("RAY_CGRAPH_buffer_size_bytes", quantity_ceil(graph.buffer_size)),
        # Our own drain comes first; Ray's would hold every deletion up by 30 s.
        _plain("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 0),
        # Ray would run the ranks below all else on the node.
        _plain("RAY_worker_niceness", 0),
        # Ranks pick their device by local rank and must see all of the pod's.
        _plain("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", 1),
        _plain("RAY_USAGE_STATS_ENABLED", 0),
        *(variable.to_raw() for variable in spec.engine.env),
    ]


def _plain(name: str, value: str | int) -> dict[str, Any]:
    return {"name": name, "value": str(value)}


def _downward(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
