"""The picture in other orders: every GPU is there once, at its own place in the picture's bytes."""

from __future__ import annotations

import numpy as np
import pytest

from drover_dashboard.widgets.grouping import GROUPS, grouped
from drover_proto import fleet_pb2 as pb

NODES = [("n0", "r0", "l0"), ("n1", "r0", "l1"), ("n2", "r1", "l0"), ("n3", "r1", "")]
HELD = [0, 0, 0, 0, 0, 1, 1, -1, -1, -1, 7, -1, 1, 1, 1, 1]  # 7: of a newer answer than the names


def layout() -> pb.Layout:
    made = pb.Layout(version="v", job_names=["small", "large"], jobs=np.array(HELD, "<i4").tobytes())
    for rack in ("r0", "r1"):
        mine = [pb.RackNode(name=name, gpus=4, leaf=leaf, pool="p") for name, where, leaf in NODES if where == rack]
        made.racks.add(name=rack, nodes=mine)
    return made


@pytest.mark.parametrize("by", list(GROUPS))
def test_every_gpu_is_there_once(by: str) -> None:
    places = [
        (node["first"] + slot, node["name"], slot)
        for group in grouped(layout(), by)
        for node in group["nodes"]
        for slot in node.get("slots", range(node["gpus"]))
    ]
    names = [name for name, _, _ in NODES]
    assert sorted(places) == [(4 * n + slot, names[n], slot) for n in range(4) for slot in range(4)]


def test_groups_by_leaf() -> None:
    found = {group["name"]: [node["name"] for node in group["nodes"]] for group in grouped(layout(), "leaf")}
    assert found == {"l0": ["n0", "n2"], "l1": ["n1"], "(no leaf)": ["n3"]}


def test_jobs_the_largest_first_and_what_nobody_holds_last() -> None:
    found = [(g["name"], [(n["name"], n.get("slots")) for n in g["nodes"]]) for g in grouped(layout(), "job")]
    assert found == [
        ("large", [("n1", [1, 2]), ("n3", None)]),
        ("small", [("n0", None), ("n1", [0])]),
        ("(no job)", [("n1", [3]), ("n2", None)]),
    ]


def test_a_large_group_is_drawn_in_blocks() -> None:
    made = pb.Layout(version="v")
    made.racks.add(name="r", nodes=[pb.RackNode(name=f"n{n}", gpus=1, pool="p") for n in range(40)])
    assert [(g["name"], len(g["nodes"])) for g in grouped(made, "pool")] == [("p", 16), ("p (2)", 16), ("p (3)", 8)]
    assert [len(g["nodes"]) for g in grouped(made, "rack")] == [40]
