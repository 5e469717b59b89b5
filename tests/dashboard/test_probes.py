"""The Probes page: what is drawn of a collector's answers, and absence as absence."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import grpc
import pytest

from drover_core.model.events import (
    ProbeOrder,
    ProbeReason,
    ProbeVerdict,
    to_json,
)
from drover_dashboard.client import FleetClient
from drover_dashboard.pages import probes_parts as parts
from drover_dashboard.widgets.view import Viewer
from drover_proto import fleet_pb2 as pb

from .conftest import HOSTILE, NOW_MS, Chosen
from .test_pages import opened

WHO = Viewer(UTC, NOW_MS)


def value(node: str, gpu: int | None, number: float | None, verdict: str = "pass", **more: Any) -> pb.ProbeValue:
    base = {"ts_ms": NOW_MS - 60_000, "text": HOSTILE, "expected": 789.0, "detectable": 0.03}
    return pb.ProbeValue(node=node, gpu=gpu, value=number, verdict=verdict, **(base | more))


def gemm() -> pb.ProbeFigure:
    values = [value("n1", 0, 790.0), value("n1", 1, 749.0, "fail", worse=0.0507), value("n2", 0, 788.0)]
    values += [value("n2", 1, None, "unknown"), value("n2", 2, 770.0, "doubtful", worse=0.024)]
    group = pb.ProbeGroup(configuration="driver 570", size=4, centre=789.0, spread=0.003, detectable=0.03)
    return pb.ProbeFigure(
        figure="gemm_bf16", unit="TFLOP/s", better="higher", sku="NVIDIA H200", values=values, groups=[group]
    )


def pairs() -> pb.ProbeFigure:
    found = [
        value("n1", 0, 376.0, peer=1),
        value("n1", 1, 188.0, "fail", peer=0),
        value("n1", 0, None, "unknown", peer=2),
    ]
    return pb.ProbeFigure(figure="p2p", unit="GB/s", better="higher", values=found)


def test_the_bars_count_every_board_once_and_only_what_was_measured() -> None:
    drawn = parts.spread(gemm(), "", None)
    assert sum(bin_["pass"] for bin_ in drawn["bins"]) == 2
    assert sum(bin_["fail"] for bin_ in drawn["bins"]) == 1
    assert sum(bin_["unknown"] for bin_ in drawn["bins"]) == 1, "the doubtful one; what is absent has no bar"
    assert drawn["low"] < 749.0
    assert drawn["high"] > 790.0
    assert [(line["kind"], line["value"]) for line in drawn["lines"]] == [
        ("centre", 789.0), ("limit", pytest.approx(789 * 0.97)),
    ]  # fmt: skip


def test_marks_are_what_failed_or_the_nodes_own() -> None:
    assert [(m["id"], m["label"], m["verdict"]) for m in parts.spread(gemm(), "", None)["marks"]] == [
        ("n1/1", "", "fail")
    ]
    own = parts.spread(gemm(), "n2", 2)["marks"]
    assert [(m["label"], m["strong"]) for m in own] == [("0", False), ("2", True)], "GPU 1 has no value"
    assert parts.spread(gemm(), "n1", None)["marks"][1]["title"] == "n1 GPU 1: 749.0 (-5.1 %)"


def test_lower_is_better_has_its_limit_above() -> None:
    figure = gemm()
    figure.better = "lower"
    (limit,) = [line for line in parts.spread(figure, "", None)["lines"] if line["kind"] == "limit"]
    assert limit["value"] == pytest.approx(789 * 1.03)


def test_a_figure_that_nobody_gave_says_so() -> None:
    drawn = parts.spread(pb.ProbeFigure(figure="gemm_fp64", unit="TFLOP/s"), "n1", None)
    assert drawn["empty"] == "No node has given this figure yet."
    alone = parts.spread(pb.ProbeFigure(figure="x", values=[value("n1", 0, 5.0)]), "", None)
    assert alone["low"] < 5.0 < alone["high"]


def test_the_worst_come_first_and_what_passed_is_left_out() -> None:
    rows = parts.worst_rows(gemm(), WHO)
    assert [(row.cells[0].text, row.cells[1].text, row.cells[2].text) for row in rows] == [
        ("failed", "n1 GPU 1", "749.0 TFLOP/s"),
        ("look again", "n2 GPU 2", "770.0 TFLOP/s"),
        ("not judged", "n2 GPU 1", "absent"),
    ]
    assert rows[0].cells[2].mark is not None
    assert rows[0].cells[2].mark.text == "-5.1 %"


def test_a_nodes_figures_in_one_table() -> None:
    exact = pb.ProbeFigure(figure="sdc", unit="products", better="exact")
    exact.values.extend([value("n2", 0, 412.0), value("n2", 1, 412.0, "fail")])
    of_node = pb.ProbeFigure(figure="allreduce", unit="GB/s", better="higher", values=[value("n2", None, 361.0)])
    of_n2 = gemm()
    del of_n2.values[:2]
    rows = parts.node_rows([of_n2, pairs(), of_node, exact], [0, 1, 2], WHO, "sdc")
    assert [[cell.text for cell in row.cells] for row in rows] == [
        ["gemm_bf16", "789.0 TFLOP/s", "788.0", "absent", "770.0", "", "1 min ago"],
        ["allreduce", "789.0 GB/s", "", "", "", "361.0", "1 min ago"],
        ["sdc", "exact", "right", "", "not probed", "", "1 min ago"],
    ]
    assert (rows[0].cells[3].kind, rows[2].cells[4].kind) == ("absent", "absent")
    assert rows[2].cells[3].mark is not None
    assert (rows[2].cells[3].mark.text, rows[2].tone) == ("WRONG", "asked")


def test_the_matrix_has_each_way_and_shows_what_was_not_measured() -> None:
    drawn = parts.matrix(pairs())
    assert (drawn["slots"], drawn["best"]) == ([0, 1, 2], 376.0)
    assert {place: (cell["value"], cell["verdict"]) for place, cell in drawn["cells"].items()} == {
        "0/1": (376.0, "pass"), "1/0": (188.0, "fail"), "0/2": (None, "unknown"),
    }  # fmt: skip
    assert parts.matrix(None)["empty"] == "No bandwidth between its GPUs has been measured."


def test_a_history_with_the_moment_of_its_decline() -> None:
    reply = pb.ProbeHistoryReply(figure="hbm_copy", unit="GB/s", drift="worse", since_ms=NOW_MS - 1000, steady=False)
    for number in range(3):
        reply.points.add(ts_ms=NOW_MS - 3000 + 1000 * number, value=4300.0 if number != 1 else None)
    drawn = parts.history(reply, "History", 5, NOW_MS, WHO)
    assert drawn.marks == [NOW_MS - 1000]
    (line,) = drawn.lines
    assert [bool(v == v) for v in line.values] == [True, False, True], "a gap, and never 0"
    empty = parts.history(pb.ProbeHistoryReply(figure="hbm_copy", unit="GB/s"), "History", 5, NOW_MS, WHO)
    assert empty.absent == "no run has measured it"


@pytest.mark.parametrize(
    ("state", "passed", "shown"),
    [
        ("asked", [], ("waits", "info")),
        ("sent", [], ("under way", "info")),
        ("done", [True, True], ("passed", "healthy")),
        ("done", [True, False], ("failed", "confirmed")),
        ("failed", [False], ("failed", "confirmed")),
        ("done", [True, None], ("not proved", "unknown")),
        ("failed", [None], ("no result", "unknown")),
        ("done", [], ("not proved", "unknown")),
    ],
)
def test_an_order_is_passed_only_where_all_is_proved(
    state: str, passed: list[bool | None], shown: tuple[str, str]
) -> None:
    order = ProbeOrder("p1", "n1", (), "quick", (), ProbeReason.CONFIRM, state, NOW_MS)
    verdicts = [
        ProbeVerdict("p1", "n1", gpu, ok, "", "text", NOW_MS, ProbeReason.CONFIRM) for gpu, ok in enumerate(passed)
    ]
    row = pb.ProbeOrderRow(order_json=to_json(order), verdicts_json=map(to_json, verdicts))
    (cells,) = [line.cells for line in parts.order_rows([row], WHO)]
    assert (cells[0].text, cells[0].badge) == shown


@pytest.mark.parametrize(
    ("number", "text"), [(749.512, "749.5"), (4302.4, "4,302"), (0.0512, "0.05120"), (4.2, "4.200"), (0.0, "0")]
)
def test_four_digits_count(number: float, text: str) -> None:
    assert parts.number(number) == text


# ---- the pages


class Probed(Chosen):
    def ListProbes(self, request: pb.ProbesRequest, context: grpc.ServicerContext) -> pb.ProbeList:
        self._called(f"probes {request.figure} {request.node}", context)
        figures = [gemm(), pairs()]
        return pb.ProbeList(figures=[f for f in figures if request.figure in ("", f.figure)])

    def ProbeHistory(self, request: pb.ProbeHistoryRequest, context: grpc.ServicerContext) -> pb.ProbeHistoryReply:
        self._called(f"history {request.gpu}", context)
        reply = pb.ProbeHistoryReply(figure=request.figure, unit="TFLOP/s", drift=HOSTILE)
        reply.points.add(ts_ms=NOW_MS - 1000, value=5.0)
        return reply

    def ListProbeOrders(self, request: pb.ProbeOrdersRequest, context: grpc.ServicerContext) -> pb.ProbeOrderList:
        self._called(f"orders {request.node}", context)
        order = ProbeOrder("p1", "n1", (), "quick", (), ProbeReason.PERSON, "failed", NOW_MS, "", HOSTILE, HOSTILE)
        return pb.ProbeOrderList(orders=[pb.ProbeOrderRow(order_json=to_json(order))])


@pytest.fixture
def chosen() -> Chosen:
    return Probed()


@pytest.mark.parametrize(
    "query", [{}, {"node": "n1", "gpu": "1"}, {"node": "n1", "figure": "p2p"}, {"figure": "junk", "gpu": "x"}]
)
def test_the_page_runs_and_hostile_text_stays_text(shared: FleetClient, chosen: Chosen, query: dict[str, str]) -> None:
    app = opened("probes", **query)
    formatted = [element.value for element in (*app.markdown, *app.caption, *app.title, *app.header)]
    assert not any("script" in text or ":red[**" in text for text in formatted)
    figure = query.get("figure", "gemm_bf16").replace("junk", "gemm_bf16")
    assert f"probes {figure} " in chosen.calls
    asked = [call for call in chosen.calls if call.startswith("history")]
    assert asked == (["history 1"] if "gpu" in query and "node" in query else []), "of the GPU in the address"


def test_without_a_gpu_in_the_address_the_worst_ones_history_is_shown(shared: FleetClient, chosen: Chosen) -> None:
    opened("probes", node="n1")
    assert "history 1" in chosen.calls


def test_the_node_page_has_its_probes(shared: FleetClient, chosen: Chosen) -> None:
    opened("node", node="n1")
    assert "probes  n1" in chosen.calls


def test_without_a_collector_the_page_says_why(shared: FleetClient, chosen: Chosen) -> None:
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "connection refused")
    texts = " ".join(text.value for text in opened("probes").text)
    assert "(connection refused): is drover-collector running?" in texts
