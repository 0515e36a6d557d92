"""The mapping of ranks to nodes and devices, over odd layouts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tpinference_engine.config import Device
from tpinference_engine.executor.placement import (
    Layout,
    PlacedActor,
    RayNode,
    choose_layout,
    describe_shortage,
    find_misplacement,
    observe_nodes,
    order_ranks,
    ranks_on_node,
)


def nodes(*slots: int) -> list[RayNode]:
    return [RayNode(f"id-{i}", f"pod-{i}", count) for i, count in enumerate(slots)]


def actor(node_id: str, device: str = "cpu", pid: int = 1) -> PlacedActor:
    return PlacedActor(f"pod-{node_id}", node_id, node_id, "10.0.0.1", device, pid)


def row(name: str, resources: dict[str, float], *, alive: bool = True) -> dict[str, Any]:
    return {
        "NodeID": f"id-{name}",
        "NodeManagerHostname": name,
        "Alive": alive,
        "Resources": resources,
    }


@pytest.mark.parametrize(
    ("slots", "ranks", "per_node", "wanted"),
    [
        pytest.param([8], 8, None, (1, 8), id="one node holds all"),
        pytest.param([4, 8, 4], 8, None, (1, 8), id="one of several holds all"),
        pytest.param([4, 4], 8, None, (2, 4), id="two halves"),
        pytest.param([3, 2, 2], 6, None, (3, 2), id="uneven nodes, even ranks"),
        pytest.param([5, 1], 6, None, None, id="enough in sum, but not evenly"),
        pytest.param([1] * 7, 7, None, (7, 1), id="a prime over single devices"),
        pytest.param([8, 8], 8, 4, (2, 4), id="spread though one would do"),
        pytest.param([8], 8, 4, None, id="asked for two nodes, there is one"),
        pytest.param([8], 2, 8, (1, 2), id="more room a node than ranks"),
        pytest.param([0, 1], 2, 1, None, id="a head without room does not count"),
        pytest.param([0, 1, 1], 2, 1, (2, 1), id="a head and two workers"),
        pytest.param([], 1, None, None, id="no node yet"),
    ],
)
def test_layout_uses_the_fewest_nodes_evenly(
    slots: list[int], ranks: int, per_node: int | None, wanted: tuple[int, int] | None
) -> None:
    layout = choose_layout(nodes(*slots), ranks, per_node, "cuda")
    assert (layout and (layout.num_nodes, layout.ranks_per_node)) == wanted


def test_bundles_are_one_a_node_of_whole_devices() -> None:
    layout = choose_layout(nodes(4, 4), 8, None, "cuda")
    assert layout is not None
    assert layout.bundles == [{"GPU": 4.0}, {"GPU": 4.0}]
    assert layout.strategy == "STRICT_SPREAD"


def test_one_node_is_packed() -> None:
    layout = choose_layout(nodes(2), 2, None, "cpu")
    assert layout is not None
    assert layout.strategy == "STRICT_PACK"
    assert layout.bundles == [{"CPU": pytest.approx(0.02)}]


@pytest.mark.parametrize(
    ("device", "resources", "slots"),
    [
        pytest.param("cuda", {"GPU": 8.0, "CPU": 96.0}, 8, id="devices count, not cores"),
        pytest.param("cuda", {"CPU": 96.0}, 0, id="no device"),
        pytest.param("cpu", {"CPU": 1.0}, 100, id="a share of a core"),
        pytest.param("cpu", {"CPU": 0.07}, 7, id="a share that floats badly"),
        pytest.param("cpu", {"GPU": 1.0}, 0, id="a head with no cpus declared"),
    ],
)
def test_room_of_a_node_is_what_it_declares(
    device: Device, resources: dict[str, float], slots: int
) -> None:
    assert observe_nodes([row("pod", resources)], device) == (RayNode("id-pod", "pod", slots),)


def test_dead_nodes_are_not_seen() -> None:
    table = [row("old", {"GPU": 8.0}, alive=False), row("new", {"GPU": 1.0})]
    assert [node.name for node in observe_nodes(table, "cuda")] == ["new"]


def test_shortage_names_what_is_wanted_and_what_is_there() -> None:
    said = describe_shortage(nodes(0, 1), 2, 1, "cpu")
    assert said == (
        "want 2 Ray nodes with room for 1 ranks each (by CPU), have room for pod-0: 0, pod-1: 1"
    )
    assert describe_shortage([], 2, None, "cuda") == (
        "want room for 2 ranks (by GPU), have room for no node at all"
    )


def test_ranks_go_node_by_node_and_by_device_number() -> None:
    placed = [
        actor("b", "cuda:10"),
        actor("a", "cuda:1"),
        actor("b", "cuda:9"),
        actor("a", "cuda:0"),
    ]
    assert order_ranks(placed, driver_node_id="elsewhere") == [3, 1, 2, 0]


def test_the_drivers_node_comes_first_whichever_it_is() -> None:
    placed = [actor("a", pid=1), actor("b", pid=2), actor("c", pid=3)]
    first = [order_ranks(placed, driver_node_id=node)[0] for node in ("a", "b", "c")]
    assert first == [0, 1, 2]


def test_order_does_not_depend_on_how_actors_came_up() -> None:
    placed = [actor(node, f"cuda:{d}") for node in ("x", "y", "z") for d in range(12)]
    for seed in range(20):
        shuffled = random.Random(seed).sample(placed, len(placed))
        order = order_ranks(shuffled, driver_node_id="y")
        assert sorted(order) == list(range(len(placed)))
        assert [shuffled[i] for i in order] == placed[12:24] + placed[:12] + placed[24:]


def test_ranks_of_a_node_are_counted() -> None:
    assert ranks_on_node([actor("a"), actor("b"), actor("a")]) == [2, 1, 2]


@pytest.mark.parametrize(
    ("placed", "layout", "said"),
    [
        pytest.param(
            [actor("a"), actor("a")], Layout(2, 1, "CPU", 0.01), "pod-a: 2, expected 1 on each of",
            id="both on one node",
        ),
        pytest.param(
            [actor("a"), actor("b"), actor("b")], Layout(1, 3, "CPU", 0.01), "pod-a: 1, pod-b: 2",
            id="over two nodes",
        ),
        pytest.param(
            [actor("a", "cuda:0"), actor("a", "cuda:0")], Layout(1, 2, "GPU", 1.0),
            "2 ranks share cuda:0 of pod-a", id="one device twice",
        ),
    ],
)  # fmt: skip
def test_misplacement_is_found(placed: Sequence[PlacedActor], layout: Layout, said: str) -> None:
    assert said in str(find_misplacement(placed, layout))


def test_right_placement_passes() -> None:
    placed = [
        actor("a", "cuda:0"),
        actor("b", "cuda:0"),
        actor("a", "cuda:1"),
        actor("b", "cuda:1"),
    ]
    assert find_misplacement(placed, Layout(2, 2, "GPU", 1.0)) is None
    assert find_misplacement([actor("a"), actor("a")], Layout(1, 2, "CPU", 0.01)) is None
