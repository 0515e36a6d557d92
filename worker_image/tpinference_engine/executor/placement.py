"""Which ranks go to which Ray nodes, and in what order: the one owner of that mapping.

Pure functions over what Ray's node table and the placed actors say. It does not know Ray's API, so
odd layouts are unit tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tpinference_engine.config import Device

Resource = Literal["GPU", "CPU"]

CPU_RANK_SHARE = 0.01
"""Of one CPU, as Ray counts them: enough to be placed where CPUs are declared (a head pod with
num-cpus 0 gets no rank) and too little to run out of them."""


@dataclass(frozen=True, slots=True)
class RayNode:
    node_id: str
    name: str
    """Host name: the pod's name in a cluster."""
    slots: int
    """Ranks that its declared resources can hold."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The wanted shape: one bundle a node, each of `ranks_per_node` ranks."""

    num_nodes: int
    ranks_per_node: int
    resource: Resource
    amount: float
    """Of `resource`, for one rank."""

    @property
    def strategy(self) -> Literal["STRICT_PACK", "STRICT_SPREAD"]:
        return "STRICT_PACK" if self.num_nodes == 1 else "STRICT_SPREAD"

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [{self.resource: self.amount * self.ranks_per_node}] * self.num_nodes


@dataclass(frozen=True, slots=True)
class PlacedActor:
    """Where an actor came up, by its own account."""

    pod: str
    node_id: str
    node: str
    """The Kubernetes node, or again Ray's id where there is none."""
    address: str
    device: str
    pid: int


def rank_demand(device: Device) -> tuple[Resource, float]:
    return ("GPU", 1.0) if device == "cuda" else ("CPU", CPU_RANK_SHARE)


def observe_nodes(table: Sequence[Mapping[str, Any]], device: Device) -> tuple[RayNode, ...]:
    """The living nodes of `ray.nodes()`."""
    resource, amount = rank_demand(device)
    return tuple(
        RayNode(
            node_id=str(row["NodeID"]),
            name=str(row["NodeManagerHostname"]),
            # Half a share more, since 0.07 / 0.01 is a little under 7.
            slots=int((float(row["Resources"].get(resource, 0.0)) + amount / 2) / amount),
        )
        for row in table
        if row["Alive"]
    )


def choose_layout(
    nodes: Sequence[RayNode], num_ranks: int, ranks_per_node: int | None, device: Device
) -> Layout | None:
    """The fewest nodes that hold all ranks, the same number on each; None if these can't yet."""
    if ranks_per_node is not None:
        candidates = [min(ranks_per_node, num_ranks)]
    else:
        candidates = [n for n in range(num_ranks, 0, -1) if num_ranks % n == 0]
    resource, amount = rank_demand(device)
    for per_node in candidates:
        num_nodes = num_ranks // per_node
        if sum(node.slots >= per_node for node in nodes) >= num_nodes:
            return Layout(num_nodes, per_node, resource, amount)
    return None


def describe_shortage(
    nodes: Sequence[RayNode], num_ranks: int, ranks_per_node: int | None, device: Device
) -> str:
    """What is wanted and what there is, for whoever has to find the missing node."""
    resource, _ = rank_demand(device)
    if ranks_per_node is None:
        want = f"room for {num_ranks} ranks"
    else:
        per_node = min(ranks_per_node, num_ranks)
        want = f"{num_ranks // per_node} Ray nodes with room for {per_node} ranks each"
    have = ", ".join(f"{n.name}: {n.slots}" for n in nodes) or "no node at all"
    return f"want {want} (by {resource}), have room for {have}"


def order_ranks(placed: Sequence[PlacedActor], driver_node_id: str) -> list[int]:
    """Actor indices in rank order: the driver's node first, then node by node and by device."""

    def key(index: int) -> tuple[bool, str, int, int]:
        actor = placed[index]
        return (
            actor.node_id != driver_node_id,
            actor.node_id,
            _device_index(actor.device),
            actor.pid,
        )

    return sorted(range(len(placed)), key=key)


def ranks_on_node(placed: Sequence[PlacedActor]) -> list[int]:
    """For each actor, how many actors its node holds."""
    counts = Counter(actor.node_id for actor in placed)
    return [counts[actor.node_id] for actor in placed]


def find_misplacement(placed: Sequence[PlacedActor], layout: Layout) -> str | None:
    """What contradicts the layout that was asked for, read back from where the actors are."""
    counts = Counter(actor.node_id for actor in placed)
    if sorted(counts.values()) != [layout.ranks_per_node] * layout.num_nodes:
        found = ", ".join(f"{_pod_of(placed, node)}: {n}" for node, n in sorted(counts.items()))
        return (
            f"ranks were placed as {found}, "
            f"expected {layout.ranks_per_node} on each of {layout.num_nodes} nodes"
        )
    if layout.resource == "GPU":
        devices = Counter((actor.node_id, actor.device) for actor in placed)
        (node_id, device), count = devices.most_common(1)[0]
        if count > 1:
            return f"{count} ranks share {device} of {_pod_of(placed, node_id)}"
    return None


def _pod_of(placed: Sequence[PlacedActor], node_id: str) -> str:
    return next(actor.pod for actor in placed if actor.node_id == node_id)


def _device_index(device: str) -> int:
    # As a number: "cuda:10" sorts before "cuda:9" as text.
    _, _, index = device.partition(":")
    return int(index) if index else 0
