"""`drover job`: the list and one job, for people and as JSON; what is not known is `-`, absent or left out, never 0."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from drover_cli.main import main
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

NAN = float("nan")
HOUR_MS = 3_600_000
JUDGED = {"newest_tick_ms": 1}  # of the collector
LOSS = pb.JobLoss(
    from_ms=1_800_000_000_000, held_ms=32 * HOUR_MS, lost_ms=3 * HOUR_MS,
    shares=pb.LedgerShares(waiting_ms=3 * HOUR_MS),
    parts=[
        pb.JobLossPart(blame="gpu", where="n1 GPU 3", incident="i1", cause="power_cap", ms=2 * HOUR_MS),
        pb.JobLossPart(blame="unknown", ms=HOUR_MS, summary="no incident explains it"),
    ],
    doubts=["Work repeated since the last checkpoint is not known."],
    moves=[
        pb.JobMove(job="t1", node="n7", asked_ms=1_800_000_000_000, answer="saved", text="job t1 saved itself",
                   kept_ms=HOUR_MS // 2),
        pb.JobMove(job="t1", node="n8", asked_ms=1_800_000_000_000, answer="none", text="it did not answer"),
    ],
)  # fmt: skip
ROW = pb.JobRow(job="t\x1b1", gpus=16, nodes=2, since_ms=1_800_000_000_000, severity="warning", hurt="n1 is slow")

GPUS = [pb.JobGpu(node="n0", gpu=0, health="healthy"), pb.JobGpu(node="n1", gpu=3, health="suspect", incident="i1")]
CLOCKS = pb.JobMetric(metric="sm_clock_mhz", values=array("f", [1980, 1410]).tobytes(), median=1980)
POWER = pb.JobMetric(metric="power_w", values=array("f", [550, NAN]).tobytes())
DETAIL = pb.JobDetail(
    row=ROW, gpus=GPUS, metrics=[CLOCKS, POWER], absent=["steps: nothing reports them"], loss=LOSS,
    sentence="Job t\x1b is hurt; it lost 3.0 of 32.0 GPU-hours (9.4%).",
)  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests that were made, in order."""
    requests: list[Any] = []

    class Stub(FleetStandIn):
        def ListJobs(self, request: pb.ListJobsRequest) -> pb.JobList:
            requests.append(request)
            return pb.JobList(jobs=[] if request.ended else [ROW], total=1)

        def GetJob(self, request: pb.JobRequest) -> pb.JobDetail:
            requests.append(request)
            return DETAIL

        def GetStatus(self, request: pb.StatusRequest) -> pb.Status:
            return pb.Status(**JUDGED)

    Stub().install(monkeypatch)
    return requests


def test_the_list(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "--limit", "5"]) == 0
    line = capsys.readouterr().out.splitlines()[2]
    assert line.split() == ["t", "1", "16", "2", "2027-01-15T08:00:00Z", "-", "-", "-", "-", "n1", "is", "slow"]
    assert asked[0].limit == 5
    assert main(["job", "--ended"]) == 0
    assert "none ended in the last 24 h" in capsys.readouterr().out


def test_whose_a_job_is(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "t1"]) == 0
    assert "  owner unknown\n" in capsys.readouterr().out
    mine = pb.JobOwner(team="vi\x1bsion", user="alice", said_by="environment", text="team vi\x1bsion, user alice")
    ROW.owner.CopyFrom(mine)
    try:
        assert main(["job"]) == 0
        assert capsys.readouterr().out.splitlines()[2].split()[9:12] == ["vi", "sion", "alice"]
        assert main(["job", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["owner"]["user"] == "alice"
    finally:
        ROW.ClearField("owner")


def test_the_list_as_json_has_null_for_what_is_not_known(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["since_ms"] == 1_800_000_000_000
    assert answer["mfu_ratio"] is None
    assert answer["ended_ms"] is None


def test_one_job_has_those_in_trouble_first(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "t1"]) == 0
    out = capsys.readouterr().out
    assert asked[0].job == "t1"
    lines = [line for line in out.splitlines() if " GPU " in line and line.startswith("n")]
    assert [line.split()[0] for line in lines] == ["n1", "n0"]
    assert "1,410 MHz" in lines[0]
    assert "absent" in lines[0]
    assert "not known: steps: nothing reports them" in out
    assert "\x1b" not in out
    assert "PLACE" not in out


def test_no_incident_names_a_job_only_once_something_was_judged(
    asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    DETAIL.row.hurt = ""
    try:
        assert main(["job", "t1"]) == 0
        assert "no open incident names it" in capsys.readouterr().out
        monkeypatch.setitem(JUDGED, "newest_tick_ms", 0)
        assert main(["job", "t1"]) == 0
        assert "nothing is judged yet: whether an incident names it is not known" in capsys.readouterr().out
    finally:
        DETAIL.row.hurt = ROW.hurt


def test_one_job_shows_where_its_ranks_stand(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    DETAIL.parallel, DETAIL.gpus[1].place = (
        "pipeline 2, tensor 8 of 16 ranks, by its command line",
        "pipeline stage 1 of 2",
    )
    try:
        assert main(["job", "t1"]) == 0
        out = capsys.readouterr().out
        assert "  ranks: pipeline 2, tensor 8 of 16 ranks, by its command line\n" in out
        (slow,) = [line for line in out.splitlines() if line.startswith("n1 GPU 3")]
        assert "suspect  pipeline stage 1 of 2  1,410 MHz" in slow
        assert main(["job", "t1", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert [gpu["place"] for gpu in answer["gpus_shown"]] == [None, "pipeline stage 1 of 2"]
    finally:
        DETAIL.parallel, DETAIL.gpus[1].place = "", ""


def test_one_job_as_json(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "t1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [gpu["values"] for gpu in answer["gpus_shown"]] == [
        {"sm_clock_mhz": 1980, "power_w": 550},
        {"sm_clock_mhz": 1410},
    ]
    assert answer["medians"] == {"sm_clock_mhz": 1980}
    assert answer["absent"] == ["steps: nothing reports them"]


def test_one_job_says_first_whether_it_is_healthy_and_then_whose_fault_the_loss_is(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job", "t1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert asked[0].loss
    assert lines[0] == "Job t  is hurt; it lost 3.0 of 32.0 GPU-hours (9.4%)."
    (gpu,) = [line.split() for line in lines if line.startswith("  gpu")]
    assert gpu == ["gpu", "n1", "GPU", "3", "2.0", "67%", "i1", "power", "cap"]
    (unknown,) = [line.split() for line in lines if line.startswith("  unknown")]
    assert unknown == ["unknown", "-", "1.0", "33%", "-", "no", "incident", "explains", "it"]
    (saved,) = [line for line in lines if "n7" in line]
    assert saved.endswith("before n7 went out: job t1 saved itself; 0.5 GPU-hours not repeated")
    (silent,) = [line for line in lines if "n8" in line]
    assert silent.endswith("it did not answer"), "unknown is not 0"
    assert main(["job", "t1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [move["answer"] for move in answer["loss"]["moves"]] == ["saved", "none"]
    assert sum(part["ms"] for part in answer["loss"]["parts"]) == answer["loss"]["lost_ms"] == 3 * HOUR_MS
    assert answer["loss"]["shares"]["waiting_ms"] == 3 * HOUR_MS
    assert answer["sentence"].startswith("Job t")
