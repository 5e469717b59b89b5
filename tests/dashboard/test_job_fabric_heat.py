"""The pages about jobs, fabric and heat, and what their browser components are given."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from drover_core.metrics.catalog import Scope
from drover_core.model.events import (
    Evidence,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
    to_json,
)
from drover_dashboard.client import FleetClient
from drover_dashboard.pages import (
    fabric_parts,
    incident_detail,
    job_parts,
)
from drover_dashboard.pages import (
    thermals_parts as heat_parts,
)
from drover_dashboard.widgets import view
from drover_dashboard.widgets.components import ASSETS
from drover_proto import fleet_pb2 as pb

from .test_pages import opened

NOW_MS = 1_800_000_000_000
HOSTILE = "<script>alert(1)</script> :red[**x**]"
WHO = view.Viewer(view.fmt.zone("UTC"), NOW_MS)


def incident(**changes: Any) -> Incident:
    fields: dict[str, Any] = {
        "id": "i1",
        "kind": IncidentKind.STRAGGLER,
        "cause": "power_cap",
        "scope": "gpu",
        "node": "n2",
        "gpu": 1,
        "members": (("n2", 1),),
        "opened_ms": NOW_MS - 50_000,
        "since_ms": NOW_MS - 60_000,
        "closed_ms": None,
        "severity": Severity.WARNING,
        "confidence": 0.9,
        "action": RecommendedAction.PROBE,
        "summary": f"GPU 1 of n2 {HOSTILE}",
        "advice": "",
        "job": HOSTILE,
        "gpu_hours_waited": 1.5,
    }
    return Incident(**(fields | changes))


def job_row(**changes: Any) -> pb.JobRow:
    hurt = {"hurt": incident().summary, "severity": "warning", "incidents": ["i1"], "waiting_share": 0.25}
    return pb.JobRow(job=HOSTILE, gpus=4, nodes=2, since_ms=NOW_MS - 3_600_000, **(hurt | changes))


def job_detail() -> pb.JobDetail:
    values = np.array([1980, 1965, 1350, np.nan], "<f4")
    gpus = [pb.JobGpu(node=f"n{1 + at // 2}", gpu=at % 2, incident="i1" if at == 2 else "") for at in range(4)]
    clock = pb.JobMetric(metric="sm_clock_mhz", values=values.tobytes(), p10=1473, median=1965, p90=1977, known=3)
    newer = pb.JobMetric(metric="of_tomorrow", values=values.tobytes())
    return pb.JobDetail(
        row=job_row(), ts_ms=NOW_MS, gpus=gpus, metrics=[clock, newer], incidents_json=[to_json(incident())],
        absent=["No GPU of it reports: power."], loss=job_loss(), sentence=f"Job {HOSTILE} is hurt.",
    )  # fmt: skip


def job_loss() -> pb.JobLoss:
    hour = 3_600_000
    parts = [
        pb.JobLossPart(blame="gpu", where=f"n2 GPU 1 {HOSTILE}", incident="i1", cause="power_cap", ms=hour * 3 // 2),
        pb.JobLossPart(blame="unknown", ms=hour // 2, summary="no incident explains it"),
    ]
    phases = [
        pb.JobPhase(lane="run", from_ms=NOW_MS - 2 * hour, to_ms=NOW_MS, text="4 GPUs"),
        pb.JobPhase(lane="slow", from_ms=NOW_MS - hour, to_ms=NOW_MS, incident="i1", text=HOSTILE, severity="warning"),
    ]
    return pb.JobLoss(
        from_ms=NOW_MS - 2 * hour, to_ms=NOW_MS, held_ms=8 * hour, lost_ms=2 * hour, parts=parts, phases=phases,
        shares=pb.LedgerShares(useful_ms=6 * hour, waiting_ms=2 * hour),
    )  # fmt: skip


def fabric() -> pb.Fabric:
    nodes = [pb.LeafNode(node="n1", state="ok"), pb.LeafNode(node="n2", state="trouble", why=HOSTILE)]
    bad = pb.LeafRow(
        name="leaf2", nodes=nodes, nodes_troubled=1, ports=4, ports_down=1, severity="critical", incident="i2",
        verdict=f"One of 2 nodes, not the switch: n2. {HOSTILE}", errors=7, downs=2,
    )  # fmt: skip
    port = pb.PortRow(node="n2", link="mlx5_0", leaf="leaf2", state="down", trouble=HOSTILE, downs=2)
    return pb.Fabric(
        ts_ms=NOW_MS, counted_from_ms=NOW_MS - 3_600_000, leafs=[bad, pb.LeafRow(name="leaf1")], leafs_total=2,
        ports=[port], ports_total=1, nvlinks=[pb.NvlinkRow(gpu=0, links_up=16, links_usual=18), pb.NvlinkRow(gpu=1)],
    )  # fmt: skip


def thermals() -> pb.Thermals:
    warm = pb.RackHeat(
        name="r2", row="A", nodes=1, gpus=2, inlet_c=31.5, gpu_median_c=60, gpu_max_c=87, gpu_max_at="n2 GPU 1",
        power_w=1100, power_known=2, limit_w=1400, throttled=1, incident="i3", cause="inlet", severity="warning",
        summary=f"Rack r2 gets hot air: 31.5 degC {HOSTILE}",
    )  # fmt: skip
    hot = pb.HotGpu(node="n2", gpu=1, rack="r2", temp_c=87, held_share=0.9, resistance=0.18, expected=0.06)
    return pb.Thermals(
        ts_ms=NOW_MS, racks=[pb.RackHeat(name="r1", row="A", nodes=1, gpus=2), warm], hot=[hot], hot_total=1,
        nodes=[pb.NodeHeat(node="n2", inlet_c=31.5, throttled=1)], absent=["No fan is known."],
    )  # fmt: skip


@pytest.fixture
def chosen(chosen: Any) -> Any:
    """The server of other pages, with answers for these."""
    answers = {
        "ListJobs": pb.JobList(jobs=[job_row()], total=1), "GetJob": job_detail(), "GetFabric": fabric(),
        "GetThermals": thermals(), "ListProbes": pb.ProbeList(),
    }  # fmt: skip
    for name, answer in answers.items():

        def reply(_request: Any, context: Any, name: str = name, answer: Any = answer) -> Any:
            chosen._called(name, context)
            return answer

        setattr(chosen, name, reply)
    return chosen


PAGES = [
    ("job", {}), ("job", {"job": "j"}), ("fabric", {}), ("fabric", {"node": "n2"}), ("thermals", {"rack": "r2"}),
]  # fmt: skip


@pytest.mark.parametrize(("page", "query"), PAGES)
def test_pages_run_and_hostile_text_stays_text(shared: FleetClient, page: str, query: dict[str, str]) -> None:
    app = opened(page, **query)
    formatted = [element.value for element in (*app.markdown, *app.caption, *app.title, *app.header)]
    assert not any("script" in text or ":red[**" in text for text in formatted)
    assert all("script" not in metric.label + str(metric.value) + str(metric.delta) for metric in app.metric)


@pytest.mark.parametrize(("page", "query"), PAGES)
def test_a_collector_that_falls_silent_leaves_the_last_picture(
    shared: FleetClient, chosen: Any, monkeypatch: pytest.MonkeyPatch, page: str, query: dict[str, str]
) -> None:
    now = [1_000_000]
    monkeypatch.setattr(shared, "_now_ms", lambda: now[0])
    app = opened(page, **query)
    before = [text.value for text in app.text]
    now[0] += 60_000
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "connection refused")
    app.run()
    assert not app.exception
    after = [text.value for text in app.text]
    assert any("(connection refused): is drover-collector running? Shown is the last answer" in text for text in after)
    assert len([text for text in before if text in after]) >= len(before) - 1, "what was shown stays"


@pytest.mark.parametrize("page", ["job", "fabric", "thermals"])
def test_without_a_collector_and_of_one_that_is_older_the_page_says_so(
    shared: FleetClient, chosen: Any, page: str
) -> None:
    chosen.failure = (grpc.StatusCode.UNIMPLEMENTED, "no such method")
    assert any("has not known a question of this page" in text.value for text in opened(page).text)
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "connection refused")
    assert any("has not answered since" in text.value for text in opened(page).text)


def test_the_worst_leaf_is_chosen_and_kept_in_the_address(shared: FleetClient) -> None:
    assert opened("fabric").query_params["leaf"] == "leaf2"
    assert "leaf" not in opened("fabric", node="n2").query_params


def test_a_job_says_who_slows_it_and_since_when_and_leaves_the_cost_to_the_ledger() -> None:
    cheap = incident(id="i2", gpu_hours_waited=None, severity=Severity.CRITICAL, summary="A port flaps.")
    over = incident(id="i3", gpu_hours_waited=9.0, closed_ms=NOW_MS, summary="It was slow.")
    sentence = job_parts.culprit([cheap, over, incident(summary="GPU 1 of n2 is slow.")], WHO)
    assert sentence.startswith("GPU 1 of n2 is slow.\nSince 07:59:00 UTC (1 min).")
    assert sentence.endswith("Other open incidents of the job: 1.")
    assert "GPU-hours" not in sentence, "an incident's own hours are another sum than the ledger's above"
    assert not any("GPU-hours" in label + remark for label, _, remark in job_parts.tiles(job_detail(), WHO))
    assert job_parts.culprit([over], WHO) == ""


def test_a_job_whose_open_incident_names_no_node_does_not_say_that_none_is_open() -> None:
    whole = incident(node=None, gpu=None, summary="Job j is 35% slower.")
    assert job_parts.culprit([whole], WHO) == ""
    assert job_parts.no_culprit([whole]).startswith("Its open incidents stand below")
    assert job_parts.no_culprit([incident(closed_ms=NOW_MS)]).startswith("No open incident")


def test_dots_name_the_slow_gpu_and_leave_absent_values_out() -> None:
    data = job_parts.dots(job_detail(), {"i1": "it is slow"}, WHO)
    (row,) = data["rows"]
    assert row["values"] == [1980, 1965, 1350, None]
    assert (row["absent"], row["low"], row["high"]) == (1, 1350, 1980)
    assert row["said"] == "SM clock: median 1,965 MHz; n2 GPU 0 1,350 MHz"
    assert [gpu["name"] for gpu in data["gpus"] if gpu["named"]] == ["n2 GPU 0"]
    assert {gpu["place"] for gpu in data["gpus"]} == {""}
    nothing = job_parts.dots(pb.JobDetail(row=job_row(), absent=["Its GPUs: no values."]), {}, WHO)
    assert nothing["empty"] == "Its GPUs: no values."


def test_equal_values_are_not_stretched_to_a_spread() -> None:
    values = np.full(4, 1.0, "<f4").tobytes()
    full = pb.JobMetric(metric="gpu_util_ratio", values=values, p10=1, median=1, p90=1, known=4)
    detail = pb.JobDetail(row=job_row(), gpus=[pb.JobGpu(node="n1", gpu=at) for at in range(4)], metrics=[full])
    (row,) = job_parts.dots(detail, {}, WHO)["rows"]
    assert (row["low"], row["high"]) == (pytest.approx(0.94), 1.0)


def test_what_a_job_does_not_report_is_absent_and_no_zero() -> None:
    empty = pb.JobDetail(row=pb.JobRow(job="j", gpus=1, nodes=1))
    shown = {label: value for label, value, _ in job_parts.tiles(empty, WHO)}
    assert shown == {
        "GPUs": "1", "Waits": "none known", "Step time": "unknown",
        "Tokens/s": "unknown", "MFU": "unknown", "Network in use": "unknown",
    }  # fmt: skip


def test_whose_a_job_is_stands_there_and_unknown_is_said() -> None:
    mine = pb.JobOwner(team="perception", user="alice", text="team perception, user alice", said_by="environment")
    (known, unknown) = job_parts.rows([job_row(owner=mine), job_row()], WHO, with_steps=False, with_owners=True)
    assert (known.cells[-1].text, known.cells[-1].sub) == ("perception", "alice")
    assert (unknown.cells[-1].text, unknown.cells[-1].kind) == ("unknown", "absent")
    assert job_parts.owner(job_row()) == "Owner: unknown."
    assert job_parts.owner(job_row(owner=mine)) == (
        "Owner: team perception, user alice, as its processes' environment says."
    )


def test_the_share_that_waits_says_what_it_is_a_mean_of() -> None:
    """The sentence of the incident says how long peers wait in each step now; both stood there without a word."""
    shown = next(remark for label, _, remark in job_parts.tiles(job_detail(), WHO) if label == "Waits")
    assert shown == f"mean since {WHO.clock(NOW_MS - 60_000)}"


def test_a_leaf_says_how_many_of_its_nodes_are_in_trouble() -> None:
    bad, calm = fabric_parts.leaf_tiles(fabric(), "leaf1", WHO)["groups"][0]["tiles"]
    assert (bad["mark"], bad["tone"], [state for state, _ in bad["cells"]]) == (
        "1 of 2 nodes",
        "bad",
        ["ok", "trouble"],
    )
    assert calm["subs"][1:] == ["errors not known, downs not known", "use not known"]
    assert fabric_parts.verdict(fabric(), WHO)[1].startswith("leaf2: One of 2 nodes, not the switch: n2.")
    switch = pb.LeafRow(name="leaf1", nodes_troubled=6, switch=True, verdict="It is the switch.")
    assert fabric_parts.verdict(pb.Fabric(leafs=[switch]), WHO) == ("summary", "It is the switch.")
    assert fabric_parts.leaf_tiles(pb.Fabric(leafs=[switch]), "", WHO)["groups"][0]["tiles"][0]["mark"] == "THE SWITCH"
    assert fabric_parts.verdict(pb.Fabric(leafs=[pb.LeafRow(name="x")]), WHO)[1] == "", "nothing known is no good news"
    assert fabric_parts.leaf_tiles(pb.Fabric(absent=["Name them."]), "", WHO)["empty"] == "Name them."


def test_an_nvlink_that_is_gone_is_marked_and_one_not_reported_is_absent() -> None:
    fewer, silent = fabric_parts.nvlink_rows(fabric(), "n2")
    assert fewer.cells[1].mark is not None
    assert fewer.cells[1].mark.text == "of 18"
    assert [cell.kind for cell in silent.cells[1:]] == ["absent"] * 5


def test_racks_stand_by_row_and_an_absent_value_has_no_colour() -> None:
    data = heat_parts.rack_tiles(thermals(), heat_parts.MEASURES["inlet"], "r2")
    (row,) = data["groups"]
    cool, warm = row["tiles"]
    assert row["label"] == "Row A"
    assert (cool["value"], cool["share"]) == ("absent", None)
    assert (warm["value"], warm["mark"], warm["tone"]) == ("31.5 °C", "1 held", "bad")
    assert 0 <= warm["share"] <= 1
    assert heat_parts.power(thermals().racks[1]) == "1.1 kW"
    assert heat_parts.power(pb.RackHeat(gpus=8, power_w=1100, power_known=7, budget_w=1000)) == (
        "OVER: 1.1 of 1.0 kW (7 of 8 GPUs)"
    )
    assert heat_parts.verdict(thermals(), WHO).startswith("Rack r2 gets hot air: 31.5 °C")
    unknown = pb.Thermals(racks=[pb.RackHeat(name="r1")])
    assert heat_parts.verdict(unknown, WHO) == "", "nothing known is no good news"
    assert {value for _, value, _ in heat_parts.numbers(unknown)[:4]} == {"absent"}, "nor is none held by heat"


def test_what_heat_does_is_not_shown_as_nothing_where_nobody_reports_it() -> None:
    rack = pb.RackHeat(name="r1", incident="i", cause="cooling", gpu_max_c=90)
    reply = pb.Thermals(ts_ms=1, racks=[rack], held_known=0)
    assert heat_parts.verdict(reply, WHO) == "Poor cooling in r1. Inlets are not known."
    assert {label: value for label, value, _ in heat_parts.numbers(reply)}["Held by heat"] == "absent"
    reply.held_known = 8
    assert {label: value for label, value, _ in heat_parts.numbers(reply)}["Held by heat"] == "0"
    silent, known = heat_parts.node_rows([pb.NodeHeat(node="n1"), pb.NodeHeat(node="n2", gpu_median_c=50)])
    assert (silent.cells[-1].text, known.cells[-1].text) == ("absent", "0")


def test_leafs_with_an_unknown_part_are_not_all_well() -> None:
    nodes = [pb.LeafNode(node="n1", state="ok"), pb.LeafNode(node="n2", state="unknown")]
    sentence = fabric_parts.verdict(pb.Fabric(leafs=[pb.LeafRow(name="x", nodes=nodes)]), WHO)[1]
    assert sentence == "No leaf is known to have trouble; of 1 node the ports are not known."
    assert (
        fabric_parts.verdict(pb.Fabric(leafs=[pb.LeafRow(name="x", nodes=nodes[:1])]), WHO)[1] == "No leaf has trouble."
    )


def test_a_chart_of_a_port_is_of_the_port_that_the_evidence_names() -> None:
    """Asked for without it, the collector refused: `no link given` stood in the place of the proof."""
    port = Evidence("port mlx5_4 has been down for 30 s", "link_up", 0.0, 1.0, port="mlx5_4")
    loop = Evidence("Steps take 2.5 s.", "step_time_s", 2.5, 2.0)
    found = incident(node="n1", gpu=None, evidence=(port, port, loop))
    (target,) = incident_detail._targets(found, Scope.LINK)
    assert (target.node, target.link) == ("n1", "mlx5_4")
    assert not incident_detail._targets(incident(evidence=(loop,)), Scope.WORKLOAD), "none named, none asked"


@pytest.mark.parametrize("name", ["bad", "warn", "good"])
def test_words_of_rows_stand_out_from_white(name: str) -> None:
    """WCAG 2.1, 1.4.3: a contrast of 4.5, which axe-core missed at `HURT` and `down` in the light theme."""
    style = (ASSETS / "table.css").read_text("utf-8")
    color = style.partition(f"--{name}: #")[2][:6]
    parts = [int(color[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    assert 1.05 / (np.dot((0.2126, 0.7152, 0.0722), linear) + 0.05) >= 4.5


def test_evidence_repeats_no_figure_of_its_sentence() -> None:
    power = Evidence("power: 371 W; median of 127 peers 479 W", "power_w", 371.0, 479.0, None, 127)
    assert incident_detail._numbers(power) == ""
    bare = Evidence("row_remap_failed is 1", "row_remap_failed", 1.0, 0.0)
    assert incident_detail._numbers(bare) == "Row remap failed: yes, expected no"


def test_a_jobs_time_line_says_what_is_known_and_what_nobody_reports() -> None:
    data = job_parts.timeline(job_detail(), WHO)
    lanes = {lane["label"]: lane for lane in data["lanes"]}
    (slow,) = lanes["Slow"]["parts"]
    assert (slow["low"], slow["high"], slow["look"]) == (0.5, 1.0, "slow warning")
    assert lanes["Runs"]["parts"][0]["text"].endswith("4 GPUs")
    assert [label for label, lane in lanes.items() if lane["unknown"]] == ["Steps", "Checkpoints"]
    assert lanes["Faults"]["empty"] == "no fault is known"
    assert len(data["ticks"]) == 5
    assert job_parts.timeline(pb.JobDetail(row=job_row()), WHO)["ticks"] == [], "nothing is stored of it yet"


def test_whose_fault_the_lost_time_is_stands_in_lines_that_add_up() -> None:
    first, second = job_parts.blame(job_loss()).splitlines()
    assert first.startswith("1.5 GPU-hours, 75 %: one GPU, n2 GPU 1")
    assert first.endswith("(power cap, incident i1)")
    assert second == "0.5 GPU-hours, 25 %: unknown (no incident explains it)"
    assert job_parts.blame(pb.JobLoss(held_ms=5)) == ""


def test_the_job_page_begins_with_its_sentence(shared: FleetClient) -> None:
    texts = [text.value for text in opened("job", job="j").text]
    assert texts[0] == f"Job {HOSTILE} is hurt."
