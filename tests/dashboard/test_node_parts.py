"""The Node page: GPUs and inventory against their peers, moments in the charts, and a time that is drawn open."""

from __future__ import annotations

from dataclasses import replace

import pytest
from streamlit.testing.v1 import AppTest

from drover_dashboard import charts, node_detail, view
from drover_dashboard.client import FleetClient
from drover_dashboard.table import Row
from drover_proto import fleet_pb2 as pb

from .conftest import NOW_MS, Chosen, event
from .test_pages import PAGES

WHO = view.Viewer(view.fmt.zone("UTC"), NOW_MS)


def texts(row: Row) -> list[tuple[str, str, str]]:
    """(text, mark, hatched or not) of each cell."""
    return [(cell.text, cell.mark.text if cell.mark else "", cell.kind) for cell in row.cells]


def gpu(job: str = "job1", **values: tuple[float, float] | str) -> Row:
    """A GPU's row; of each metric (value, median of its peers), or why it is absent."""
    told = [
        pb.Value(metric=name, reason=found)
        if isinstance(found, str)
        else pb.Value(
            metric=name, present=True, value=found[0], ts_ms=NOW_MS, peers_median=found[1], peers=7 if found[1] else 0
        )
        for name, found in values.items()
    ]
    return node_detail._gpu(pb.GpuDetail(gpu=0, job=job, values=told), False, WHO)


def links(row: Row) -> list[tuple[str, str, str]]:
    return texts(row)[2 + len(node_detail.COMPARED) :][:2]


def test_links_as_those_of_the_peers_carry_no_mark() -> None:
    row = gpu(nvlink_active_links=(18, 18), pcie_generation=(5, 5), pcie_width=(16, 16), nvlink_tx_bytes_per_s=(2e9, 0))
    assert links(row) == [("18 up", "", ""), ("gen 5 x16", "", "")]
    assert row.cells[2 + len(node_detail.COMPARED)].sub == "2.0 GB/s"


def test_fewer_links_or_lanes_than_the_peers_have_are_marked() -> None:
    row = gpu(nvlink_active_links=(16, 18), pcie_generation=(5, 5), pcie_width=(8, 16))
    assert links(row) == [("16 up", "of 18", ""), ("gen 5 x8", "peers: gen 5 x16", "")]


@pytest.mark.parametrize(("job", "mark"), [("job1", "peers: gen 5 x16"), ("", "")])
def test_a_lower_generation_is_a_mark_only_of_a_gpu_at_work(job: str, mark: str) -> None:
    assert links(gpu(job, nvlink_active_links=(18, 18), pcie_generation=(1, 5), pcie_width=(16, 16)))[1][1] == mark


def test_links_that_are_not_told_are_absent_with_the_reason() -> None:
    told = links(gpu(nvlink_active_links="unsupported", pcie_generation=(5, 5)))
    assert [kind for _, _, kind in told] == ["absent", "absent"]
    assert told[0][0] == view.fmt.absent("unsupported")


def test_what_differs_from_the_peers_comes_first_and_says_what_they_have() -> None:
    detail = pb.NodeDetail(
        inventory={"bios": "2.1", "driver": "560.0", "serial": "S1"},
        inventory_peers=[
            pb.InventoryPeers(key="bios", usual="2.1", having=30, peers=31),
            pb.InventoryPeers(key="driver", usual="570.1", having=29, peers=31),
        ],
    )
    rows = [texts(row) for row in node_detail.inventory_rows(detail)]
    assert [(row[0][0], row[1][1]) for row in rows] == [
        ("driver", "29 of 31 peers: 570.1"), ("bios", ""), ("serial", ""),
    ]  # fmt: skip


def test_a_chart_tells_when_each_kind_of_event_came_first_and_the_newest_kinds() -> None:
    at = [replace(event(), ts_ms=ts_ms, code=code) for ts_ms, code in ((5, "13"), (9, "13"), (7, "79"), (1, "31"))]
    assert node_detail.moments(at, 4, 9) == [(5, "XID 13 GPU 1"), (7, "XID 79 GPU 1")]
    many = [replace(event(), ts_ms=number, code=str(number)) for number in range(9)]
    assert [ts_ms for ts_ms, _ in node_detail.moments(many, 0, 9)] == [5, 6, 7, 8]


@pytest.mark.parametrize("wrong", ["", "x", "1060-1000", "1000", "-5-7"])
def test_a_time_that_is_drawn_open_is_asked_for_alone(shared: FleetClient, chosen: Chosen, wrong: str) -> None:
    app = AppTest.from_file(str(PAGES / "node.py"), default_timeout=20)
    app.query_params["node"] = "n2"
    app.query_params[charts.OPEN] = "1000-1060"
    app.run()
    assert not app.exception
    assert [(asked.from_ms, asked.to_ms) for asked in chosen.series] == [(1_000_000, 1_060_000)]
    app.query_params[charts.OPEN] = wrong
    app.run()
    assert not app.exception
    assert chosen.series[-1].to_ms - chosen.series[-1].from_ms == 900_000, "a link that says nothing of use"


@pytest.mark.parametrize(
    ("held", "asked", "first"),
    [({0: "j1", 1: "j2"}, "1", 1), ({0: "j1", 1: "j2"}, "", 0), ({1: "j2"}, "0", 1), ({}, "0", None)],
)
def test_the_charts_peers_are_those_of_a_gpu_that_holds_a_job(
    shared: FleetClient, chosen: Chosen, held: dict[int, str], asked: str, first: int | None
) -> None:
    chosen.held = held
    app = AppTest.from_file(str(PAGES / "node.py"), default_timeout=20)
    app.query_params["node"] = "n2"
    app.query_params["gpu"] = asked
    app.run()
    assert not app.exception
    request = chosen.series[-1]
    assert request.with_peers is (first is not None)
    assert [target.gpu for target in request.targets] == ([0, 1] if first is None else [first, 1 - first])


@pytest.mark.parametrize(("own", "mark"), [(None, "+25 %"), (400.0, ""), (300.0, "-25 %")])
def test_a_gpu_is_held_against_its_peers_at_the_same_time(own: float | None, mark: str) -> None:
    """Its newest value is 500 W, the median of half a minute before was 400 W; an older collector tells no `own`."""
    told = pb.Value(metric="power_w", present=True, value=500, ts_ms=NOW_MS, peers_median=400, peers=7, own=own)
    row = node_detail._gpu(pb.GpuDetail(gpu=0, job="job1", values=[told]), False, WHO)
    assert texts(row)[2 + node_detail.COMPARED.index("power_w")][:2] == ("500 W", mark)
