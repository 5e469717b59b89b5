"""`drover report`: weeks, the four forms, hostile names, and the exact ledger of a case without a collector."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drover_cli.errors import CliError
from drover_cli.main import main
from drover_cli.report import forms
from drover_cli.report.page import make_page
from drover_cli.report.span import title, week
from drover_core.times import from_iso, iso
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

HOUR = 3_600_000
NOW = from_iso("2026-11-28T12:00:00Z")
MONDAY = from_iso("2026-11-16T00:00:00Z")
HOSTILE = "=cmd|<script>*x*"
SHARES = pb.LedgerShares(useful_ms=80 * HOUR, waiting_ms=4 * HOUR, lost_ms=HOUR, idle_ms=5 * HOUR, unknown_ms=10 * HOUR)
TOTAL = pb.LedgerRow(
    shares=SHARES, held_ms=100 * HOUR, gpus=8, goodput=0.8, ettr=0.75, interruptions=1, cost=250.0, lost_cost=12.5,
    energy=pb.LedgerEnergy(mj=7_200_000_000, known_ms=90 * HOUR, unknown_ms=10 * HOUR, cost=0.5),
)  # fmt: skip


def ledger() -> pb.Ledger:
    job = pb.LedgerRow()
    job.CopyFrom(TOTAL)
    job.name = HOSTILE
    taken = pb.LedgerShares(waiting_ms=4 * HOUR, lost_ms=HOUR)
    fell = {"kind": "xid", "cause": "xid_79", "shares": taken}
    return pb.Ledger(
        from_ms=MONDAY, to_ms=MONDAY + 168 * HOUR, total=TOTAL, jobs=[job], jobs_total=12, objective=0.999,
        currency="EUR", causes=[pb.LedgerCause(**fell, incidents=1, cost=12.5)],
        incidents=[pb.LedgerIncident(**fell, id="7ue5", where="n1 GPU 3", summary="GPU 3 fell off", since_ms=MONDAY)],
        availability=[
            pb.Availability(
                gpus=8, in_ms=1300 * HOUR, lost_ms=44 * HOUR, available=0.967, interruptions=1, between_ms=100 * HOUR,
                recovered=1, recovery_ms=HOUR,
            )
        ],
        repair=[pb.NodeToRepair(node="n1", pool="train", stage="repair", reason="gemm failed", interruptions=1)],
        fleet_energy=TOTAL.energy, doubts=["Teams are not known."],
    )  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[pb.LedgerRequest]:
    """Requests that were made, in order."""
    requests: list[pb.LedgerRequest] = []

    class Stub(FleetStandIn):
        def GetLedger(self, request: pb.LedgerRequest) -> pb.Ledger:
            requests.append(request)
            return ledger()

    Stub().install(monkeypatch)
    monkeypatch.setattr("drover_cli.commands.report.time.time", lambda: NOW / 1000)
    return requests


def test_a_week_begins_on_monday_and_the_running_one_ends_now() -> None:
    assert week("2026-W47", NOW) == (MONDAY, MONDAY + 168 * HOUR)
    assert week("last", NOW) == (MONDAY, MONDAY + 168 * HOUR)
    assert week("2026w48", NOW) == (MONDAY + 168 * HOUR, NOW)
    assert week("2026-W01", NOW)[0] == from_iso("2025-12-29T00:00:00Z")
    assert title(MONDAY, MONDAY + 168 * HOUR) == "week 2026-W47"
    assert title(MONDAY, MONDAY + HOUR) == "2026-11-16 00:00 to 2026-11-16 01:00 UTC"


@pytest.mark.parametrize(("text", "said"), [("2026-W54", "is no week"), ("47", "is no week"), ("2026-W50", "not come")])
def test_what_is_no_week_is_refused(text: str, said: str) -> None:
    with pytest.raises(CliError, match=said):
        week(text, NOW)


@pytest.mark.parametrize(
    ("arguments", "span"),
    [
        ([], (NOW - 168 * HOUR, NOW)),
        (["--week"], (MONDAY, MONDAY + 168 * HOUR)),
        (["--days", "2"], (NOW - 48 * HOUR, NOW)),
        (["--since", "3h"], (NOW - 3 * HOUR, NOW)),
        (["--since", "3h", "--until", "1h"], (NOW - 3 * HOUR, NOW - HOUR)),
    ],
)
def test_the_time_that_is_asked_for(
    asked: list[pb.LedgerRequest], arguments: list[str], span: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *arguments]) == 0
    assert [(request.from_ms, request.to_ms) for request in asked] == [span]
    assert capsys.readouterr().out.startswith("# GPU report, week 2026-W47")


@pytest.mark.parametrize(
    "arguments",
    [["--until", "1h"], ["--days", "1", "--since", "2h"], ["--since", "1h", "--until", "2h"], ["--incidents", "x"]],
)
def test_arguments_that_contradict_each_other(asked: list[pb.LedgerRequest], arguments: list[str]) -> None:
    assert main(["report", *arguments]) == 2
    assert not asked


def test_the_page_says_in_plain_words_what_was_lost_and_what_is_unknown() -> None:
    page = make_page(ledger())
    assert page.facts == [
        "Jobs held 100.0 GPU-hours (250 EUR). 80.0 % of that was useful work (goodput). 10.0 % is unknown: goodput is"
        " at most 90.0 %.",
        "Faults took 5.0 GPU-hours (12 EUR): 1.0 lost, 4.0 waiting, 0.0 restarting.",
        "GPUs were in service for 96.7 % of the time, which misses the objective of 99.900 %.",
        "Faults ended 1 run of jobs, one each 4.2 d. 1 worked again, on average 60 min after the fault.",
        "GPUs took 2.0 kWh (0 EUR). For 10.0 % of the time it is not known.",
    ]
    tables = {table.title: table for table in page.tables}
    assert ["repeating work since the last checkpoint", "not known", "-"] in tables["Where GPU time went"].rows
    assert tables["The costliest incidents"].rows == [
        ["n1 GPU 3", "GPU error (XID 79)", "2026-11-16T00:00:00Z", "5.0", "-"]
    ]
    assert all(len(row) == len(table.headers) for table in page.tables for row in table.rows)


def test_pools_stand_below_the_fleet_where_there_are_some() -> None:
    def rows(*pools: str) -> list[str]:
        made = ledger()
        for name in pools:
            made.availability.add(name=name, gpus=4, available=0.9)
        (table,) = [table for table in make_page(made).tables if table.title.startswith("Availability")]
        return [row[0] for row in table.rows]

    assert rows() == rows("") == ["all GPUs"]
    assert rows("train", "") == ["all GPUs", "pool train", "GPUs of no pool"]


def test_nothing_held_is_not_a_share_of_zero() -> None:
    page = make_page(pb.Ledger(from_ms=MONDAY, to_ms=NOW, total=pb.LedgerRow(), fleet_energy=pb.LedgerEnergy()))
    assert page.facts == ["No job held a GPU in this time.", "Energy is not known."]
    assert not page.tables


def test_names_of_jobs_are_text_in_every_form() -> None:
    assert "job =cmd\\|\\<script\\>\\*x\\*" in forms.markdown(ledger())
    page = forms.html_page(ledger())
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    rows = list(csv.DictReader(io.StringIO(forms.csv_rows(ledger()))))
    (job,) = [row for row in rows if row["table"] == "job"]
    assert (job["name"], job["held_ms"], job["useful_ms"], job["energy_mj"]) == (
        f"'{HOSTILE}", str(100 * HOUR), str(80 * HOUR), "7200000000",
    )  # fmt: skip
    (total,) = [row for row in rows if row["table"] == "total"]
    assert (total["repeated_ms"], total["reason"]) == ("0", "")


def test_json_has_numbers_and_null_for_what_is_not_known(
    asked: list[pb.LedgerRequest], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["report", "--json", "--job", "train", "--output", str(tmp_path / "out.json")]) == 0
    assert asked[0].job == "train"
    assert capsys.readouterr().out == ""
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["total"]["held_ms"], found["other_jobs"], found["kwh_price"]) == (100 * HOUR, None, None)
    assert found["incidents"][0]["closed_ms"] is None
    assert main(["report", "--output", str(tmp_path)]) == 2


T0 = from_iso("2026-11-01T00:00:00Z")


def write_case(path: Path) -> None:
    """20 minutes of two nodes of two GPUs; n1 is silent for 5 minutes, GPU 1 of n0 is idle from 10 on."""
    nodes = [{"name": name, "pool": "train", "sku": "H100", "gpus": 2} for name in ("n0", "n1")]
    members = [[name, slot] for name in ("n0", "n1") for slot in (0, 1)]
    jobs = [
        {"id": "train", "start": iso(T0 + 60_000), "end": iso(T0 + 1_000_123), "members": members},
        {"id": "chat", "start": iso(T0 + 1_000_123), "end": None, "members": [["n1", 1]]},
    ]
    (path / "fleet.json").write_text(json.dumps({"nodes": nodes, "jobs": jobs}))
    rows: dict[str, list[Any]] = {"ts": [], "node": [], "gpu": [], "gpu_util_ratio": [], "energy_j": []}
    for at in range(0, 1200, 10):
        for name, slot in members:
            if name == "n0" or not 300 <= at < 600:
                busy = 0.0 if (name, slot) == ("n0", 1) and at >= 600 else 0.98
                for key, value in zip(rows, (T0 + at * 1000, name, slot, busy, 1e6 + 600.0 * at), strict=True):
                    rows[key].append(value)
    times = pa.array(rows["ts"], pa.timestamp("ms", "UTC"))
    pq.write_table(pa.table({**rows, "gpu": pa.array(rows["gpu"], pa.int16()), "ts": times}), path / "gpu.parquet")


FAULT = {
    "id": "fault", "kind": "xid", "cause": "xid_79", "node": "n1", "members": [["n1", 0]], "job": "train",
    "since": iso(T0 + 900_000), "closed": None, "severity": "critical", "summary": "it fell off the bus",
    "gpu_hours_lost": None, "gpu_hours_waited": None,
}  # fmt: skip


def test_a_case_has_an_exact_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_case(tmp_path)
    (tmp_path / "found.jsonl").write_text(json.dumps(FAULT) + "\n")
    common = ["report", "--case", str(tmp_path), "--json"]
    assert main([*common, "--incidents", str(tmp_path / "found.jsonl"), "--gpu-hour", "2", "--currency", "EUR"]) == 0
    found = json.loads(capsys.readouterr().out)
    shares = found["total"]["shares"]
    assert found["total"]["held_ms"] == sum(shares.values()) == 4 * 940_123 + 199_877
    assert (shares["unknown_ms"], shares["lost_ms"], shares["waiting_ms"]) == (600_000, 100_123, 3 * 100_123)
    assert shares["idle_ms"] == 300_000
    assert found["total"]["cost"] == pytest.approx(2 * found["total"]["held_ms"] / HOUR)
    assert found["fleet_energy"]["mj"] > 0
    assert main([*common, "--incidents", str(tmp_path / "fleet.json")]) == 2


def test_the_detectors_run_over_a_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_case(tmp_path)
    event = {"ts": iso(T0 + 900_000), "node": "n1", "gpu": 0, "kind": "xid", "code": "79", "message": "off the bus"}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert main(["report", "--case", str(tmp_path), "--since", iso(T0), "--until", iso(T0 + 1_000_123), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"]["held_ms"] == sum(found["total"]["shares"].values()) == 4 * 940_123
    assert found["causes"][0]["cause"] == "xid_79"
    assert found["total"]["interruptions"] == 1
    assert main(["report", "--case", str(tmp_path), "--job", "train"]) == 2
