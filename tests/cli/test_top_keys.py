"""`drover top`: what each key does, lists that are gone through, a node's GPUs; on a real terminal."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drover_cli.commands import top, top_keys
from drover_cli.commands.top_keys import Look, keys_of, press
from drover_cli.commands.top_lists import ListFacts, nodes_of, rows, screen
from drover_cli.errors import UnreachableError
from drover_cli.main import main
from drover_core.model.events import Health, Incident, IncidentKind, RecommendedAction, Severity, to_json
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

NOW = 1_800_000_000_000
STEERS = "\x1b[2J is lost"
NAMES = [f"n{number}" for number in range(50)]


def walked(*keys: str, look: Look | None = None, nodes: list[str] | None = None) -> Look:
    look = look or Look()
    for key in keys:
        look = press(look, key, NAMES if nodes is None else nodes)
    return look


def test_keys_lead_down_and_back() -> None:
    look = walked("2", "down", "j", "down", "k")
    assert (look.view, look.at) == ("nodes", 2)
    opened = press(look, "enter", NAMES)
    assert (opened.view, opened.node) == ("node", "n2")
    assert press(opened, "esc", []) == look
    assert walked("esc", look=look).view == "fleet"
    assert walked("2", "pagedown", "pagedown", "pageup").at == 10
    assert walked("2", *["down"] * 99).at == 49
    assert walked("2", "up").at == 0
    assert walked("2", "down", nodes=[]).at == 0
    assert walked("4", "enter", nodes=[""]).view == "jobs", "a job is on many nodes"
    assert walked("q").over
    assert walked("quit").over


def test_a_filter_takes_letters_that_are_keys_elsewhere() -> None:
    look = walked("2", "/", *"qjs2")
    assert (look.contains, look.typing, look.over, look.view) == ("qjs2", True, False, "nodes")
    assert walked("backspace", "enter", look=look).contains == "qjs"
    assert not walked("enter", look=look).typing
    assert walked("esc", look=look).contains == ""
    assert walked("quit", look=look).over, "Ctrl-C always ends it"
    assert not walked("/").typing, "the picture has no filter"
    assert walked("2", "s").sorted_by() == "name"
    assert walked("2", "s", "s").sorted_by() == "trouble"


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"\x1b[A\x1b[B", ["up", "down"]), (b"jj", ["j", "j"]), (b"\x1b", ["esc"]), (b"\x1b[99;5~", []),
        (b"\r", ["enter"]), ("ä/".encode(), ["ä", "/"]), (b"\xff\xfe", []), (b"\x03", ["quit"]), (b"\x00a", ["a"]),
    ],
)  # fmt: skip
def test_what_a_terminal_sends(data: bytes, keys: list[str]) -> None:
    assert keys_of(data) == keys


def incident(node: str, severity: Severity, since_ms: int) -> Incident:
    return Incident(
        f"i{node}", IncidentKind.XID, "xid_79", "node", node, None, ((node, None),), since_ms, since_ms, None, severity,
        0.9, RecommendedAction.DRAIN, f"{node}{STEERS}", "", (), (), ("xid",),
    )  # fmt: skip


def facts() -> ListFacts:
    return ListFacts(
        pb.Status(fleet="demo", mode="observe"), NOW,
        nodes=[pb.NodeRow(name=n, health="suspect", reason=STEERS, gpu_health=["healthy", "odd"]) for n in NAMES],
        incidents=[incident("n1", Severity.WARNING, NOW), incident("n2", Severity.CRITICAL, NOW - 1)],
        jobs=[pb.JobRow(job="a", gpus=8), pb.JobRow(job="b", gpus=64)], total=12_500,
    )  # fmt: skip


def drawn(found: ListFacts, look: Look, width: int = 120, height: int = 24) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, highlight=False).print(screen(found, look, width, height))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("view", ["nodes", "incidents", "jobs", "node"])
@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (200, 60)])
def test_a_screen_fits_and_nothing_steers_the_terminal(view: str, width: int, height: int) -> None:
    found = facts()
    found.node = detail()
    for at in (0, 25, 49):
        lines = drawn(found, Look(view, at=at, node="n1"), width, height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert "\x1b" not in "".join(lines)


def test_the_list_of_jobs_says_what_is_not_judged_yet() -> None:
    found = facts()
    assert sum("not known" in line for line in drawn(found, Look("jobs"))) == 2
    found.status.newest_tick_ms = NOW
    assert sum("not hurt" in line for line in drawn(found, Look("jobs"))) == 2


STEER = "\x1b[2J\x07\x9b31m\u202e"


@pytest.mark.parametrize("view", ["nodes", "incidents", "jobs", "node"])
def test_no_word_of_a_hostile_collector_steers_the_terminal_or_leaves_a_tiny_one(view: str) -> None:
    gpu = pb.GpuDetail(health=STEER, reason=STEER, job=STEER, values=[pb.Value(metric="power_w", reason=STEER)])
    row = pb.NodeRow(name=STEER, health=STEER, rack=STEER, reason=STEER, gpu_health=[STEER])
    found = ListFacts(
        pb.Status(fleet=STEER, mode=STEER), NOW, nodes=[row], jobs=[pb.JobRow(job=STEER, hurt=STEER)],
        node=pb.NodeDetail(row=row, gpus=[gpu]), trouble=STEER,
    )  # fmt: skip
    for width, height in ((200, 24), (1, 1), (20, 2), (8, 3)):
        lines = drawn(found, Look(view, node=STEER, contains=STEER), width, height)
        assert len(lines) <= height and not set("\x1b\x07\x9b\u202e") & set("".join(lines))


def test_what_was_not_answered_is_no_list_of_nothing() -> None:
    fleet = Fleet()
    source = top._Source(fleet)  # type: ignore[arg-type]  # a stand-in
    source.ask(Look("nodes"))
    fleet.away = True
    source.try_ask(Look("incidents"), None)  # type: ignore[arg-type]  # no screen is drawn
    out = io.StringIO()
    Console(file=out, width=80, no_color=True).print(source.drawn(Look("incidents"), 80, 24))
    assert "0 incidents" not in out.getvalue() and "not known" in out.getvalue()


def test_without_a_keyboard_it_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with Path(os.devnull).open() as nobody:
        monkeypatch.setattr("sys.stdin", nobody)
        assert main(["top", "--collector", "127.0.0.1:1"]) == 2
    assert "--once" in capsys.readouterr().err


def test_the_chosen_row_is_on_the_screen_and_enter_opens_it() -> None:
    found = facts()
    for at in (0, 25, 49):
        assert any(line.startswith(f"n{at} ") for line in drawn(found, Look("nodes", at=at)))
        assert nodes_of(found, Look("nodes"))[at] == f"n{at}"
    assert "12,500 nodes, by trouble, first 50" in drawn(found, Look("nodes"))[1]
    assert nodes_of(found, Look("incidents")) == ["n2", "n1"], "the worst first"
    assert nodes_of(found, Look("incidents", order=1)) == ["n1", "n2"], "the newest first"
    assert [job.job for job in rows(found, Look("jobs", order=1))] == ["b", "a"]  # type: ignore[union-attr]  # rows of jobs
    assert len(rows(found, Look("jobs", contains="B"))) == 1


def detail() -> pb.NodeDetail:
    def value(metric: str, number: float, ts_ms: int = NOW) -> pb.Value:
        return pb.Value(metric=metric, present=True, value=number, ts_ms=ts_ms)

    well = [
        value("gpu_util_ratio", 0.5), value("framebuffer_used_bytes", 40e9), value("framebuffer_total_bytes", 80e9),
        value("power_w", 700), value("power_limit_w", 700), value("gpu_temp_c", 60), value("sm_clock_mhz", 1980),
    ]  # fmt: skip
    lost = [pb.Value(metric="gpu_util_ratio", reason="lost"), value("power_w", 100, NOW - 60_000)]
    gpus = [
        pb.GpuDetail(gpu=0, health="healthy", job="train", values=well),
        pb.GpuDetail(gpu=1, health="confirmed", reason=STEERS, values=lost),
    ]
    return pb.NodeDetail(row=pb.NodeRow(name="n1", rack="r1", health="confirmed", last_seen_ms=NOW), gpus=gpus)


def test_a_gpu_has_bars_and_what_is_absent_or_old_is_no_bar_of_zero() -> None:
    found = facts()
    found.node = detail()
    lines = drawn(found, Look("node", node="n1"), 160)
    well, lost = (next(line for line in lines if line.startswith(slot)) for slot in ("0 ", "1 "))
    assert well.count("██████░░░░░░ ") == 2, "half of its time, half of its memory"
    assert "████████████ 700" in well
    assert not set("█░") & set(lost)
    assert "lost; old values" in lost
    assert lost.split()[1] == Health.CONFIRMED


class Fleet(FleetStandIn):
    """Answers, until it is away."""

    def __init__(self) -> None:
        self.away, self.asked = False, []

    def call(self, method: Any, request: Any, deadline_s: float = 15.0) -> Any:
        self.asked.append(method.name)
        if self.away:
            raise UnreachableError("it does not answer")
        return super().call(method, request, deadline_s)

    def __getattr__(self, name: str) -> Any:
        answers = {
            "GetStatus": pb.Status(fleet="demo"), "GetPicture": pb.Picture(layout_version="v1"),
            "GetLayout": pb.Layout(version="v1"), "ListJobs": pb.JobList(), "GetNode": detail(),
            "ListIncidents": pb.IncidentList(incidents_json=[to_json(incident("n1", Severity.CRITICAL, NOW))]),
            "ListNodes": pb.NodeList(nodes=[pb.NodeRow(name="n7", health="suspect")], total=1),
        }  # fmt: skip
        return lambda _: answers[name]


def test_the_layout_is_asked_for_once_and_only_what_is_shown() -> None:
    fleet = Fleet()
    source = top._Source(fleet)  # type: ignore[arg-type]  # a stand-in
    source.ask(Look())
    source.ask(Look())
    assert fleet.asked.count("GetLayout") == 1
    fleet.asked.clear()
    source.ask(Look("nodes"))
    assert fleet.asked == ["GetStatus", "ListNodes"]
    fleet.away = True
    source.try_ask(Look("nodes"), None)  # type: ignore[arg-type]  # no screen is drawn
    assert source.nodes(Look("nodes")) == ["n7"], "the last one stays"
    out = io.StringIO()
    Console(file=out, width=80, no_color=True).print(source.drawn(Look("nodes"), 80, 24))
    assert out.getvalue().startswith("OLD since ")


def test_on_a_terminal_keys_work_and_it_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet()
    fleet.install(monkeypatch)
    outer, inner = pty.openpty()
    before = termios.tcgetattr(inner)
    shown: list[bytes] = []

    def watch() -> None:
        while data := os.read(outer, 4096):
            shown.append(data)

    threading.Thread(target=watch, daemon=True).start()
    with os.fdopen(os.dup(inner), "w") as out, os.fdopen(os.dup(inner)) as typed:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stdin", typed)
        monkeypatch.setenv("TERM", "xterm")
        keys = iter([["2"], ["enter"], ["esc"], ["q"]])
        monkeypatch.setattr(top_keys, "pressed", lambda *_: next(keys))
        assert main(["top", "--interval", "0.5"]) == 0
    assert fleet.asked[-4:-2] == ["GetStatus", "GetNode"]
    assert termios.tcgetattr(inner) == before
