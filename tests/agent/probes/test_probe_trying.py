"""One hang or crash on a GPU is tried again by a new process; a GPU that the driver has lost is reported as such."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drover_agent.probes import runner, trying
from drover_agent.probes.eligible import DriverError, Found, Gpu
from drover_agent.probes.exchange import ProbeAnswer
from drover_agent.probes.relay import results_of
from drover_agent.probes.runner import End, GpuRef, Report, Request, Runner
from drover_collector.engine.probe_evidence import read
from drover_collector.probes.judging.judgement import judge
from drover_collector.probes.judging.rows import measurement
from drover_collector.probes.judging.verdicts import verdicts
from drover_collector.store import ProbeRow
from drover_collector.store.repositories.probes import Key
from drover_core.model.events import ProbeOrder, ProbeReason, ProbeVerdict

T0 = 1_800_000_000_000

CHILD = Path(__file__).resolve().parents[2] / "testbed/probe_child.py"
GPUS = (Gpu(2, "GPU-a", "board"), Gpu(7, "GPU-b", "board"))
HELD = Gpu(7, "GPU-b", "board", pids=(1,), holders=("1 (init, root)",))


class Idle:
    """In place of a guard: nobody comes to hold a GPU."""

    lost: int | None = None
    silent = False

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def needed(self, _session: int) -> str:
        return ""


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Report]:
    monkeypatch.setattr(trying, "Guard", Idle)
    monkeypatch.setattr(runner, "SLACK_S", 0.3)
    monkeypatch.setattr(runner, "SLACK", 0.0)

    def run(part: str, *now: Gpu, error: str = "") -> Report:
        def look() -> Found:
            if error:
                raise DriverError(error)
            return Found(now or GPUS)

        monkeypatch.setattr(runner, "CHILD", (sys.executable, str(CHILD), part, str(tmp_path / "told")))
        request = Request(("gemm_bf16", "launch"), tuple(GpuRef(gpu.slot, gpu.uuid) for gpu in GPUS))
        return trying.run(request, GPUS, started.append, lambda text: None, look=look)

    started: list[Runner] = []
    return run


def judged(report: Report) -> tuple[bool | None, str]:
    """What the collector makes of it."""
    answer = ProbeAnswer("r", report.end, report.detail, "quick", 1, report.probe, report.gpu, tries=report.tries)
    end = results_of(answer, "n1", 1)[-1]
    found = measurement(ProbeRow(end, Key("board")))
    assert found is not None
    (verdict,) = judge([found]).verdicts
    return verdict.ok, verdict.text


def verdicts_of(report: Report) -> list[ProbeVerdict]:
    """Of both GPUs, in the order."""
    answer = ProbeAnswer("r", report.end, report.detail, "quick", 1, report.probe, report.gpu, tries=report.tries)
    rows = [ProbeRow(result, Key("board")) for result in results_of(answer, "n1", 1)]
    order = ProbeOrder("r", "n1", (2, 7), "quick", ("gemm_bf16",), ProbeReason.CONFIRM, "sent", T0)
    return verdicts(order, rows, judge([m for row in rows if (m := measurement(row))]), {}, T0)


@pytest.mark.parametrize(("part", "end"), [("crash", End.CRASHED), ("hang", End.HUNG)])
def test_twice_is_a_finding_about_the_gpu(tried: Callable[..., Report], part: str, end: End) -> None:
    report = tried(part)
    assert (report.end, report.gpu, report.probe, report.tries) == (end, 7, "gemm_bf16", 2)
    assert "; in a second try on it alone: " in report.detail
    ok, text = judged(report)
    assert ok is False
    assert text.startswith(f"GPU 7 of n1: gemm_bf16 {end.value} in two tries (")


def test_once_and_then_well_condemns_and_clears_nobody(tried: Callable[..., Report]) -> None:
    report = tried("crash_once")
    assert (report.end, report.gpu, report.tries) == (End.CRASHED, 7, 1)
    assert report.detail.endswith("; a second try on it alone went well")
    ok, text = judged(report)
    assert (ok, text.endswith("once is no proof: probe it again")) == (None, True)


@pytest.mark.parametrize(
    ("now", "error", "end", "text", "ok"),
    [
        ((Gpu(7, "GPU-b", "board", "the driver says of it: GPU is lost"),), "", End.LOST, "GPU is lost", False),
        ((GPUS[0],), "", End.LOST, "the driver does not list it any more", False),
        ((HELD,), "", End.CRASHED, "no second try: held by process 1 (init, root)", None),
    ],
)
def test_where_there_is_no_second_try_it_says_why(
    tried: Callable[..., Report], now: tuple[Gpu, ...], error: str, end: End, text: str, ok: bool | None
) -> None:
    report = tried("crash", *now, error=error)
    assert (report.end, report.gpu, report.tries) == (end, 7, 1)
    assert report.detail.endswith(text)
    assert judged(report)[0] is ok


@pytest.mark.parametrize("part", ["crash", "hang"])
@pytest.mark.parametrize(
    ("now", "error", "text"),
    [
        ((), "the NVIDIA driver does not answer within 10 s", "does not answer within 10 s"),
        (
            (Gpu(2, refusal="GPU is lost"), Gpu(7, refusal="GPU is lost")),
            "",
            "answers for no GPU of this node any more",
        ),
    ],
    ids=["hangs", "lost all"],
)
def test_a_driver_that_is_silent_as_a_whole_speaks_against_the_node_and_no_gpu(
    tried: Callable[..., Report], part: str, now: tuple[Gpu, ...], error: str, text: str
) -> None:
    report = tried(part, *now, error=error)
    assert (report.end, report.gpu, report.tries) == (End.LOST, None, 1)
    assert report.detail.endswith(text)
    assert judged(report)[0] is None
    found = verdicts_of(report)
    assert [(v.gpu, v.passed) for v in found] == [(2, None), (7, None), (None, None)]
    (finding,) = read(found, [], T0).findings
    assert (finding.kind, finding.cause, finding.scope, finding.gpu) == ("liveness", "driver_hung", "node", None)
    assert finding.evidence[0].text.startswith("n1: not judged, lost in gemm_bf16: ")


def test_a_process_that_cannot_be_killed_stands_in_the_driver(
    tried: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    end_all = runner.end_all
    monkeypatch.setattr(runner, "end_all", lambda child, *, at_once: not end_all(child, at_once=at_once))
    report = tried("hang")
    assert (report.end, report.tries) == (End.LOST, 1)
    ok, text = judged(report)
    assert (ok, "the driver no longer answers for it" in text) == (False, True)


def test_what_names_no_gpu_or_ends_well_is_not_tried_again(tried: Callable[..., Report]) -> None:
    assert tried("well").end is End.DONE
    assert "second try" not in tried("killed").detail, "the kernel was out of memory"
