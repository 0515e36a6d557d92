"""What the operator renders for every example is what the engine reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tpinference_engine.command_line import parse_serve, serve_parser
from tpinference_engine.config import EngineConfig, ServerConfig
from tpinference_engine.errors import InvalidConfig
from tpinference_engine.supervisor.command_line import parse_supervise
from tpinference_operator import names
from tpinference_operator.api.rules import OWNED_FLAGS
from tpinference_operator.api.v1alpha1 import TPInferenceSpec
from tpinference_operator.render.raycluster import (
    Defaults,
    Owner,
    Stamp,
    render_raycluster,
    stamp_raycluster,
)

Body = dict[str, Any]

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))
PROGRAM = ["python3", "-m", "tpinference_engine"]
DEFAULTS = Defaults(image="example.test/engine:1", ray_version="2.60.0")
STAMP = Stamp(ordinal=0, revision="abcdef01", epoch=7)


def load(path: Path) -> Body:
    body: Body = yaml.safe_load(path.read_text())
    return body


def stamped(body: Body) -> tuple[TPInferenceSpec, Body]:
    name = body["metadata"]["name"]
    spec = TPInferenceSpec.model_validate(body["spec"])
    owner = Owner(name=name, namespace="ns", uid="uid")
    return spec, stamp_raycluster(render_raycluster(spec, name, DEFAULTS), owner, STAMP)


def head_of(cluster: Body) -> Body:
    head: Body = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    return head


def worker_of(cluster: Body) -> Body:
    group = cluster["spec"]["workerGroupSpecs"][0]
    worker: Body = group["template"]["spec"]["containers"][0]
    return worker


def environ_of(container: Body) -> dict[str, str]:
    """As the kubelet and KubeRay fill it in."""
    added = {"KUBERAY_GEN_RAY_START_CMD": "ray start", "RAY_ADDRESS": "127.0.0.1:6379"}
    return added | {e["name"]: e.get("value", f"<{e['name']}>") for e in container["env"]}


def arguments(container: Body) -> list[str]:
    command: list[str] = container["command"]
    assert command[:3] == PROGRAM
    assert command[3] == "supervise"
    return command[4:]


def parsed(container: Body) -> tuple[EngineConfig, ServerConfig]:
    words = arguments(container)
    serve = words[words.index("--") + 1 :]
    assert serve[0] == "serve"
    return parse_serve(serve[1:], environ_of(container))


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest) -> Body:
    return load(request.param)


def test_there_are_examples_from_no_gpu_to_two_nodes() -> None:
    sizes = {stamped(load(path))[0].parallelism.nodes for path in EXAMPLES}
    assert {1, 2} <= sizes
    assert Path(EXAMPLES[-1]).name == "smollm2-cpu.yaml"


def test_model_and_layout_arrive(example: Body) -> None:
    spec, cluster = stamped(example)
    engine, _ = parsed(head_of(cluster))
    claim, _, path = spec.model.uri.removeprefix("pvc://").partition("/")
    assert engine.model == Path("/models") / claim / path
    assert engine.served_model_name == (spec.model.served_name or example["metadata"]["name"],)
    assert engine.tensor_parallel_size == spec.parallelism.tensor
    assert engine.ranks_per_node == spec.parallelism.ranks_per_pod
    group = cluster["spec"]["workerGroupSpecs"][0]
    assert group["numOfHosts"] * engine.ranks_per_node == engine.tensor_parallel_size


def test_how_it_computes_arrives(example: Body) -> None:
    spec, cluster = stamped(example)
    engine, _ = parsed(head_of(cluster))
    assert engine.device == {"CPU": "cpu", "CUDA": "cuda"}[spec.engine.device]
    assert engine.dtype == spec.engine.dtype.lower()
    assert engine.max_model_len == spec.engine.max_model_len
    assert engine.max_num_seqs == spec.engine.max_num_seqs
    assert engine.step_timeout_s == spec.engine.compiled_graph.get_timeout_seconds
    assert (engine.distributed_executor_backend, engine.step_transport) == ("ray", "compiled-graph")


def test_life_and_ports_arrive(example: Body) -> None:
    spec, cluster = stamped(example)
    engine, server = parsed(head_of(cluster))
    canary = spec.health_check.canary
    assert engine.startup_timeout_s == spec.health_check.startup_timeout_seconds
    assert server.shutdown_timeout_s == spec.update_strategy.drain_seconds
    assert server.canary_interval_s == canary.interval_seconds
    assert server.canary_timeout_s == canary.timeout_seconds
    assert server.canary_failure_threshold == canary.failure_threshold
    assert (server.port, server.admin_port) == (names.API_PORT, names.ADMIN_PORT)


def test_the_incarnation_arrives_by_environment(example: Body) -> None:
    _, cluster = stamped(example)
    engine, server = parsed(head_of(cluster))
    assert (engine.engine_id, engine.epoch) == (cluster["metadata"]["name"], STAMP.epoch)
    assert engine.ray_address == "127.0.0.1:6379"
    assert server.pod_name == "<TPINFERENCE_POD_NAME>"
    assert server.node_name == "<TPINFERENCE_NODE_NAME>"


def test_both_pods_can_be_supervised(example: Body) -> None:
    _, cluster = stamped(example)
    for container, role in ((head_of(cluster), "head"), (worker_of(cluster), "worker")):
        config = parse_supervise(arguments(container), environ_of(container))
        assert (config.role, config.admin_port) == (role, names.ADMIN_PORT)


def test_a_pods_grace_is_longer_than_the_supervisor_waits_for_the_engine(example: Body) -> None:
    _, cluster = stamped(example)
    template = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    head = head_of(cluster)
    config = parse_supervise(arguments(head), environ_of(head))
    assert config.engine_stop_s < template["terminationGracePeriodSeconds"]


def test_extra_arguments_arrive_after_all_others() -> None:
    body = load(EXAMPLES[-1])
    body["spec"]["engine"]["extraArgs"] = ["--max-num-batched-tokens", "512", "--block-size=32"]
    engine, _ = parsed(head_of(stamped(body)[1]))
    assert (engine.max_num_batched_tokens, engine.block_size) == (512, 32)


@pytest.mark.parametrize("max_num_seqs", [1, 2048, 2049, 65536])
def test_every_number_of_requests_that_the_api_allows_is_accepted(max_num_seqs: int) -> None:
    body = load(EXAMPLES[-1])
    body["spec"]["engine"]["maxNumSeqs"] = max_num_seqs
    engine, _ = parsed(head_of(stamped(body)[1]))
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (
        max_num_seqs,
        max(2048, max_num_seqs),
    )


def test_a_wrong_extra_argument_is_the_engines_to_refuse() -> None:
    body = load(EXAMPLES[-1])
    body["spec"]["engine"]["extraArgs"] = ["--no-such-flag"]
    with pytest.raises(InvalidConfig, match="--no-such-flag"):
        parsed(head_of(stamped(body)[1]))


@pytest.mark.parametrize("dtype", ["Auto", "BFloat16", "Float16", "Float32"])
@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_every_choice_of_the_api_is_one_of_the_engine(dtype: str, device: str) -> None:
    body = load(EXAMPLES[-1])
    body["spec"]["engine"].update(dtype=dtype, device=device)
    engine, _ = parsed(head_of(stamped(body)[1]))
    assert (engine.dtype, engine.device) == (
        dtype.lower(),
        {"CPU": "cpu", "CUDA": "cuda"}[device],
    )


def test_flags_that_extra_args_must_not_set_are_those_that_are_rendered() -> None:
    """And the engine's other spellings of them, and what arrives by environment instead."""
    body = load(EXAMPLES[-1])
    command = head_of(stamped(body)[1])["command"]
    rendered = {word for word in command[command.index("serve") :] if word.startswith("--")}
    spellings = {
        option
        for action in serve_parser()._actions
        if rendered & set(action.option_strings)
        for option in action.option_strings
    }
    assert set(OWNED_FLAGS) == spellings | {"--engine-id", "--epoch", "--ray-address"}
