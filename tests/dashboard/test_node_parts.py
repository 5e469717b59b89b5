"""The Node page: GPUs and inventory against their peers, moments in the charts, and a time that is drawn open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from drover_core.metrics import catalog
from drover_core.model import gpu_processes
from drover_core.model.gpu_processes import GpuProcess
from drover_dashboard.client import FleetClient
from drover_dashboard.pages import node_charts, node_detail, node_gpu
from drover_dashboard.widgets import charts, strip, view
from drover_dashboard.widgets.table import Cell, Row
from drover_proto import fleet_pb2 as pb

from .conftest import HOSTILE, NOW_MS, Chosen, event
from .test_pages import PAGES

WHO = view.Viewer(view.fmt.zone("UTC"), NOW_MS)


def texts(row: Row) -> list[tuple[str, str, str]]:
    """(text, mark, hatched or not) of each cell."""
    return [(cell.text, cell.mark.text if cell.mark else "", cell.kind) for cell in row.cells]


def gpu(job: str = "job1", **values: tuple[float, float] | str) -> Row:
    """A GPU's row; of each metric (value, median of its peers), or why it is absent."""
    reported = [
        pb.Value(metric=name, reason=found)
        if isinstance(found, str)
        else pb.Value(
            metric=name, present=True, value=found[0], ts_ms=NOW_MS, peers_median=found[1], peers=7 if found[1] else 0
        )
        for name, found in values.items()
    ]
    return node_detail._gpu(pb.GpuDetail(gpu=0, job=job, values=reported), False, WHO)


def links(row: Row) -> list[tuple[str, str, str]]:
    return texts(row)[3 + len(node_detail.COMPARED) :][:2]


def test_links_as_those_of_the_peers_carry_no_mark() -> None:
    row = gpu(nvlink_active_links=(18, 18), pcie_generation=(5, 5), pcie_width=(16, 16), nvlink_tx_bytes_per_s=(2e9, 0))
    assert links(row) == [("18 up", "", ""), ("gen 5 x16", "", "")]
    assert row.cells[3 + len(node_detail.COMPARED)].sub == "2.0 GB/s"


def test_fewer_links_or_lanes_than_the_peers_have_are_marked() -> None:
    row = gpu(nvlink_active_links=(16, 18), pcie_generation=(5, 5), pcie_width=(8, 16))
    assert links(row) == [("16 up", "of 18", ""), ("gen 5 x8", "peers: gen 5 x16", "")]


@pytest.mark.parametrize(("job", "mark"), [("job1", "peers: gen 5 x16"), ("", "")])
def test_a_lower_generation_is_a_mark_only_of_a_gpu_at_work(job: str, mark: str) -> None:
    assert links(gpu(job, nvlink_active_links=(18, 18), pcie_generation=(1, 5), pcie_width=(16, 16)))[1][1] == mark


def test_links_that_are_not_reported_are_absent_with_the_reason() -> None:
    shown = links(gpu(nvlink_active_links="unsupported", pcie_generation=(5, 5)))
    assert [kind for _, _, kind in shown] == ["absent", "absent"]
    assert shown[0][0] == view.fmt.absent("unsupported")


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


def test_an_event_that_repeats_is_one_part_of_the_strip_and_the_newest_stay() -> None:
    at = [replace(event(), ts_ms=ts_ms, code=code) for ts_ms, code in ((5, "13"), (9, "13"), (7, "79"), (70_000, "13"))]
    lane = strip.events(at, WHO)
    assert [(part.low_ms, part.word) for part in lane.parts] == [
        (5, "XID 13 GPU 1"), (7, "XID 79 GPU 1"), (70_000, "XID 13 GPU 1"),
    ]  # fmt: skip
    assert strip.moments([lane], 6, 9) == [7], "what began before has no line in the charts"
    assert strip.events([], WHO).known
    assert not strip.events(None, WHO).known, "what the collector did not say is not nothing"
    bars = [strip.Part(low, high, "", "", "info") for low, high in ((0, 9), (3, 5), (6, 8), (9, 12))]
    assert [[part.low_ms for part in row] for row in strip.rows(bars)] == [[0, 9], [3, 6]], "none hides another"
    many = strip.Lane("Events", [strip.Part(number, number, "", "", "event") for number in range(99)])
    assert [part.low_ms for part in strip.within(many, 0, 98)] == list(range(99 - strip.MOST, 99))


@pytest.mark.parametrize("wrong", ["", "x", "1060-1000", "1000", "-5-7", "1-999999999999"])
def test_a_time_that_is_drawn_open_is_asked_for_alone(shared: FleetClient, chosen: Chosen, wrong: str) -> None:
    app = AppTest.from_file(str(PAGES / "node.py"), default_timeout=120)
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
    app = AppTest.from_file(str(PAGES / "node.py"), default_timeout=120)
    app.query_params["node"] = "n2"
    app.query_params["gpu"] = asked
    app.run()
    assert not app.exception
    request = chosen.series[-1]
    assert request.with_peers is (first is not None)
    assert [target.gpu for target in request.targets] == ([0, 1] if first is None else [first, 1 - first])


@pytest.mark.parametrize(("own", "mark"), [(None, "+25 %"), (400.0, ""), (300.0, "-25 %")])
def test_a_gpu_is_held_against_its_peers_at_the_same_time(own: float | None, mark: str) -> None:
    """Its newest value is 500 W, the median of half a minute before was 400 W; an older collector sends no `own`."""
    newest = pb.Value(metric="power_w", present=True, value=500, ts_ms=NOW_MS, peers_median=400, peers=7, own=own)
    row = node_detail._gpu(pb.GpuDetail(gpu=0, job="job1", values=[newest]), False, WHO)
    assert texts(row)[2 + node_detail.COMPARED.index("power_w")][:2] == ("500 W", mark)


def memory(row: Row) -> Cell:
    return row.cells[2 + len(node_detail.COMPARED)]


def test_memory_limits_heat_and_what_holds_the_clock_stand_in_the_table() -> None:
    row = gpu(
        sm_clock_mhz=(1500, 0), clock_event_reasons=(0x4, 0), power_w=(690, 0), power_limit_w=(700, 0),
        gpu_temp_c=(61, 0), memory_temp_c=(83, 0), framebuffer_used_bytes=(62.1e9, 0),
        framebuffer_total_bytes=(85.9e9, 0), compute_processes=(2, 0),
    )  # fmt: skip
    below = {name: row.cells[2 + at].sub for at, name in enumerate(node_detail.COMPARED)}
    assert below["sm_clock_mhz"] == "held by software power cap"
    assert below["power_w"] == "limit 700 W"
    assert below["gpu_temp_c"] == "HBM 83 °C"
    assert (memory(row).text, memory(row).sub) == ("62.1 GB", "of 85.9 GB · 2 processes")
    idle = gpu(sm_clock_mhz=(300, 0), clock_event_reasons=(0x1, 0), framebuffer_used_bytes="no-permission")
    assert idle.cells[2].sub == "", "an idle clock is held by nothing"
    assert (memory(idle).text, memory(idle).kind) == ("no permission", "absent")


def test_a_row_of_the_table_opens_its_gpu() -> None:
    item = pb.GpuDetail(gpu=3)
    assert node_detail._gpu(item, False, WHO, "n2").href == "node?node=n2&gpu=3"


def test_one_more_metric_is_charted_first(shared: FleetClient, chosen: Chosen) -> None:
    app = AppTest.from_file(str(PAGES / "node.py"), default_timeout=120)
    app.query_params["node"], app.query_params["metric"] = "n2", "memory_temp_c"
    app.run()
    assert not app.exception
    assert chosen.series[-1].metrics[0] == "memory_temp_c"
    assert list(chosen.series[-1].metrics[1:]) == list(node_charts.CHARTED)


def test_a_counter_of_time_is_drawn_as_a_share_of_the_time() -> None:
    metric = catalog.BY_NAME["throttle_thermal_sw_us"]
    times = np.array([0, 10_000, 20_000, 30_000, 40_000], "<i8")
    sums = np.array([5e6, 5e6, 10e6, 20e6, 1e6], "<f4")  # then the driver was loaded again
    lines = [charts.Line("GPU 0", "value", sums), charts.Line("p10", "peers_p10", sums)]
    shown = charts._shares(charts.Chart(metric, times, lines, 0, 40_000))
    assert [line.role for line in shown.lines] == ["value"]
    assert np.nan_to_num(shown.lines[0].values, nan=-1).tolist() == [-1, 0, 50, 100, -1]
    assert b"% of the time" in charts.encode(charts.Chart(metric, times, lines, 0, 40_000))


def test_a_counter_is_drawn_as_what_it_grew_by() -> None:
    times = np.array([0, 10_000, 20_000, 30_000], "<i8")
    for name, sums, grown, unit in (
        ("nvlink_crc_errors", [7, 7, 9, 2], [-1, 0, 2, -1], "new in each 10 s"),  # then the driver was loaded again
        ("energy_j", [0, 5000, 12_000, 13_000], [-1, 500, 700, 100], "W"),
    ):
        line = charts.Line("GPU 0", "value", np.array(sums, "f4"))
        band = charts.Line("p10", "peers_p10", np.array(sums, "f4"))
        chart = charts.Chart(catalog.BY_NAME[name], times, [line, band], 0, 40_000)
        shown, scale, shown_unit = charts._growth(chart)
        assert [line.role for line in shown.lines] == ["value"], "a percentile of sums does not grow"
        assert (np.nan_to_num(shown.lines[0].values, nan=-1).tolist(), scale, shown_unit) == (grown, 1.0, unit)
        assert not charts.banded(chart.metric)
        last = charts._growth(replace(chart, to_ms=39_000))[0].lines[0].values[-1]
        assert np.isnan(last), "ten seconds that are not over yet"


def test_values_of_yesterday_lie_on_todays_times_and_none_is_made_up() -> None:
    then, now = np.array([0, 10, 20, 30], "<i8"), np.array([4, 14, 26, 60], "<i8")
    found = node_charts.aligned(np.array([1, np.nan, 3, 4], "f4"), then, now)
    assert np.nan_to_num(found, nan=-1).tolist() == [1, -1, 4, -1]
    assert np.isnan(node_charts.aligned(np.array([1], "f4"), then[:1], now)).all()


@pytest.mark.parametrize(
    ("vs", "targets", "asked"),
    [
        ("yesterday", [("n2", 1)], 2),
        ("n1/0", [("n2", 1), ("n1", 0)], 1),
        ("n1", [("n2", 1), ("n1", 1)], 1),
        ("0", [("n2", 1), ("n2", 0)], 1),
        ("bad/x/y", [("n2", 1), ("n2", 0)], 1),
    ],
)
def test_a_gpu_is_compared_with_another_or_with_an_earlier_day(
    shared: FleetClient, chosen: Chosen, vs: str, targets: list[tuple[str, int]], asked: int
) -> None:
    chosen.held = {1: "j1"}
    app = AppTest.from_file(str(PAGES / "node.py"), default_timeout=120)
    app.query_params["node"], app.query_params["gpu"], app.query_params["vs"] = "n2", "1", vs
    app.run()
    assert not app.exception
    assert len(chosen.series) == asked
    assert [(target.node, target.gpu) for target in chosen.series[0].targets] == targets
    earlier = chosen.series[0].to_ms - chosen.series[-1].to_ms
    assert earlier == (86_400_000 if vs == "yesterday" else 0)


def test_sections_of_a_gpu_have_what_is_there_and_why_the_rest_is_not() -> None:
    values = {
        "power_w": pb.Value(metric="power_w", present=True, value=500, ts_ms=NOW_MS, peers_median=400, peers=7),
        "gpu_temp_c": pb.Value(metric="gpu_temp_c", reason="no-permission"),
    }
    rows = node_gpu.section(values, ("power_w", "gpu_temp_c", "memory_temp_c"), WHO)
    assert [[cell.text for cell in row.cells] for row in rows] == [
        ["Power", "500 W", "400 W"],
        ["Core temperature", "no permission", ""],
        ["HBM temperature", "not reported", ""],
    ]
    assert node_gpu.section({}, ("power_w",), WHO) == [], "a section without a value is not drawn"


def test_processes_are_shown_by_permission_and_unknown_is_not_none() -> None:
    listed = [GpuProcess(pid=7, uid=1000, user="", name="<b>x</b>", since_ms=NOW_MS - 60_000)]
    inventory = {gpu_processes.key(0): gpu_processes.pack(listed)}
    item = pb.GpuDetail(gpu=0, job="job1")
    rows, _ = node_gpu.processes(item, inventory, True, WHO)
    assert [cell.text for cell in rows[0].cells][:3] == ["7", "uid 1000", "<b>x</b>"]
    assert all("processes" not in name.lower() for name, _ in node_gpu._names(item, inventory)), (
        "no users among its names"
    )
    assert node_gpu.processes(item, inventory, False, WHO) == ([], "1; their users and names are shown to operators")
    assert node_gpu.processes(item, {gpu_processes.key(0): gpu_processes.pack([])}, True, WHO) == ([], "none")
    assert node_gpu.processes(item, {}, True, WHO)[1].startswith("not known")
    detail = pb.NodeDetail(row=pb.NodeRow(name="n1"), inventory=inventory | {"bios": "2.1"})
    assert [row.cells[0].text for row in node_detail.inventory_rows(detail)] == ["bios"]


def test_conditions_of_kubernetes_say_what_is_bad_what_is_not_judged_and_what_is_unknown() -> None:
    def shown(type_: str, standing: str, **more: Any) -> tuple[tuple[str, str, str], str]:
        row = node_detail._condition(pb.NodeCondition(type=type_, status="True", standing=standing, **more), WHO)
        return texts(row)[0], row.cells[1].sub

    assert shown("KernelDeadlock", "fault", since_ms=NOW_MS - 3_600_000)[0] == ("KernelDeadlock=True", "fault", "")
    assert shown("Lunch", "shown") == (("Lunch=True", "", ""), "not judged")
    assert shown("Ready", "unknown")[0][2] == "absent"
    row = node_detail._condition(pb.NodeCondition(type="A", status="True", reason="R", message=HOSTILE), WHO)
    assert row.cells[1].text == f"R: {HOSTILE}"  # a table's cell is plain text


@pytest.mark.parametrize(("read_ms", "drawn"), [(0, False), (NOW_MS, True)])
def test_conditions_stand_on_the_page_where_they_are_read(
    read_ms: int, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[tuple[str, list[Row]]] = []
    monkeypatch.setattr(node_detail, "table", lambda key, columns, rows, **more: tables.append((key, rows)))
    bad = pb.NodeCondition(type="KernelDeadlock", status="True", standing="fault")
    node_detail._conditions(pb.NodeDetail(conditions=[bad], conditions_well=7, conditions_read_ms=read_ms), WHO)
    assert [(key, rows[-1].cells[0].text, len(rows)) for key, rows in tables] == (
        [("conditions", "well: 7", 2)] if drawn else []
    )


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("GPU 4", "n1/4"), ("gpu4", "n1/4"), ("4", "n1/4"), ("with GPU 4", "n1/4"), ("n2", "n2/3"), ("n2/4", "n2/4"),
        ("n2:4", "n2/4"), ("with n2 GPU 4", "n2/4"), ("n2 gpu 4", "n2/4"), ("yesterday", "yesterday"), ("", ""),
        ("splendid", ""), ("GPU", ""),
    ],
)  # fmt: skip
def test_a_gpu_to_compare_with_is_read_as_the_page_names_it(typed: str, read: str) -> None:
    assert node_charts._read(typed, "n1", 3, {"n1", "n2"}) == read


def test_nvlinks_stand_by_their_other_end_and_one_that_went_down_is_marked() -> None:
    ends = {f"gpu3.nvlink.{number}": f"switch 0000:0{5 + number % 2}:00.0" for number in range(4)}
    inventory = ends | {"gpu3.nvlink.4": "", "gpu3.nvlink.5": "", "gpu30.nvlink.0": "gpu x", "gpu3.vbios": "96.00"}
    rows = [[cell.text for cell in row.cells] for row in node_gpu.links(pb.GpuDetail(gpu=3), inventory)]
    assert rows == [
        ["switch 0000:05:00.0", "0, 2", "2"], ["switch 0000:06:00.0", "1, 3", "2"], ["not up any more", "4 to 5", "0"],
    ]  # fmt: skip
    assert node_gpu.links(pb.GpuDetail(gpu=1), inventory) == []
    named = dict(node_gpu._names(pb.GpuDetail(gpu=3), inventory))
    assert named["Vbios"] == "96.00"
    assert not any("nvlink" in name.lower() for name in named)
