"""What a message says: where, what, since when, what it cost."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from pathlib import Path

import pytest

from drover_collector.config import CollectorConfig
from drover_collector.notify.wording import Notification, clock_time, cut, join_names, read_message, span
from drover_core.model.events import Incident, Note, NoteKind
from drover_core.settings import load
from testbed.notified import LOST_GPU, NOW_MS, OVER, PLACES, body

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/how-to/notify.md"
RACK = tuple((f"r01n{n:02}", None) for n in range(1, 17))


def notification(step: str = "opened", now_ms: int = NOW_MS, **changes: object) -> Notification:
    incident: Incident = dataclasses.replace(LOST_GPU, **changes)  # type: ignore[arg-type]  # any field
    return read_message(body(step, incident, now_ms), PLACES)


@pytest.mark.parametrize(
    ("changes", "where", "place"),
    [
        ({}, "r01n03 GPU 3", "rack r01, pool train, H100-SXM"),
        ({"gpu": None}, "node r01n03", "rack r01, pool train, H100-SXM"),
        ({"node": "unknown", "members": (("unknown", 3),)}, "unknown GPU 3", ""),
        ({"scope": "rack", "node": None, "gpu": None, "members": RACK}, "rack r01", "pool train, H100-SXM"),
        (
            {"scope": "leaf", "node": None, "gpu": None, "members": (*RACK, ("r02n01", None))},
            "17 nodes of one leaf",
            "pool train, H100-SXM",
        ),
        (
            {"scope": "job", "node": None, "gpu": None, "members": (("r01n01", 0), ("r02n01", 0))},
            "job 4711",
            "pool train, H100-SXM",
        ),
        ({"scope": "fleet", "node": None, "gpu": None, "members": RACK}, "16 nodes", "rack r01, pool train, H100-SXM"),
        ({"scope": "fleet", "node": None, "gpu": None, "members": ()}, "the fleet", ""),
    ],
)
def test_where(changes: dict[str, object], where: str, place: str) -> None:
    one = notification(**changes)
    assert (one.where, one.place) == (where, place)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, LOST_GPU.summary),
        ({"summary": "The driver hangs."}, "r01n03 GPU 3: The driver hangs."),
        ({"summary": "Node r01n03 hangs."}, "r01n03 GPU 3: Node r01n03 hangs."),
        ({"summary": "Rack r01 is hot.", "scope": "rack", "node": None, "gpu": None}, "Rack r01 is hot."),
        ({"summary": "It stands still.", "scope": "job", "node": None, "gpu": None}, "job 4711: It stands still."),
        ({"summary": "32 of 64 nodes.", "scope": "fleet", "node": None, "gpu": None}, "32 of 64 nodes."),
    ],
)
def test_a_summary_gets_its_place_in_front_unless_it_has_it(changes: dict[str, object], what: str) -> None:
    assert notification(**changes).what == what


def test_the_first_line_says_how_it_goes_on() -> None:
    assert notification().headline == f"CRITICAL: {LOST_GPU.summary}"
    assert notification("changed").headline == f"CRITICAL (worse than before): {LOST_GPU.summary}"
    assert notification("repeated", NOW_MS + 3_600_000).headline == f"CRITICAL (still open, 74 min): {LOST_GPU.summary}"
    assert notification("closed", closed_ms=OVER.closed_ms).headline == "CLOSED: r01n03 GPU 3, xid 79, after 42 min"
    assert notification("news").headline == f"CRITICAL: {LOST_GPU.summary}"  # of a newer collector


def test_an_end_says_why_and_one_that_goes_on_elsewhere_is_none() -> None:
    over = notification("closed", closed_ms=OVER.closed_ms, timeline=OVER.timeline)
    assert over.text(NOW_MS).startswith(f"Closed: the condition has ended. It was: {LOST_GPU.summary}")
    merged = notification(
        "closed",
        closed_ms=NOW_MS,
        timeline=(
            Note(NOW_MS, "part of incident 77aa", NoteKind.ABSORBED, incident="77aa", why="part of incident 77aa"),
        ),
    )
    assert merged.headline == "MERGED: r01n03 GPU 3, xid 79, is now part of incident 77aa"
    assert merged.text(NOW_MS).startswith("This incident is now part of incident 77aa. It was: XID 79")
    assert notification("closed", closed_ms=NOW_MS).text(NOW_MS).startswith("Closed. It was: ")


def test_what_is_not_known_is_left_out() -> None:
    bare = notification(gpu_hours_lost=None, gpu_hours_waited=None, job=None, evidence=(), advice="", since_ms=NOW_MS)
    assert [label for label, _ in bare.details(NOW_MS)] == ["Where", "Since", "Drover wants"]
    assert dict(bare.details(NOW_MS))["Since"] == "23 Nov 02:13 UTC"
    assert "What to do" not in bare.text(NOW_MS)
    assert "Seen" not in bare.text(NOW_MS)


def test_what_it_cost() -> None:
    assert notification(gpu_hours_lost=0.0, gpu_hours_waited=0.01).lost == ""
    assert notification(gpu_hours_lost=1.25, gpu_hours_waited=None).lost == "1.2 GPU-hours to the fault"
    assert notification(gpu_hours_lost=None, gpu_hours_waited=3.0).lost == "3.0 GPU-hours to peers that waited"


def test_an_older_message_with_less_in_it_can_be_sent() -> None:
    data = {"id": "i1", "severity": "warning", "summary": "It is slow."}
    message = json.dumps({"type": "incident.opened", "timestamp": "2026-11-23T02:13:20Z", "data": data}).encode()
    one = read_message(message, PLACES)
    assert one.headline.startswith("WARNING: ")
    assert "It is slow." in one.text(NOW_MS)
    assert one.since_ms == one.sent_ms


def test_the_document_shows_a_message_as_sent() -> None:
    one = notification()
    shown = textwrap.indent(f"{one.headline}\n\n{one.text(NOW_MS).partition(chr(10) * 2)[2]}", " " * 4)
    assert shown in DOCUMENT.read_text("utf-8")


def test_the_documents_settings_can_be_loaded(tmp_path: Path) -> None:
    tables = re.findall(r"^    (\[\[notify\.(\w+)\]\]\n(?:    .+\n)+)", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    assert [kind for _, kind in tables] == ["webhook", "slack", "pagerduty", "alertmanager", "apprise"]
    (tmp_path / "c.toml").write_text("".join(textwrap.dedent(f"    {text}") for text, _ in tables))
    config = load(CollectorConfig, tmp_path / "c.toml").notify
    assert [len(getattr(config, kind)) for _, kind in tables] == [1] * 5


def test_lengths_and_times_of_day() -> None:
    assert [span(ms) for ms in (-5, 4_000, 119_400, 120_000, 7_199_000, 7_200_000, 11_100_000, 180_000_000)] == [
        "0 s", "4 s", "119 s", "2 min", "119 min", "2 h 00 min", "3 h 05 min", "2 d 2 h",
    ]  # fmt: skip
    assert clock_time(NOW_MS) == "23 Nov 02:13 UTC"
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 6) == "abcde…"
    assert join_names(("a", "b")) == "a, b"
    assert join_names(tuple("abcdefgh")) == "a, b, c, d, e, f and 2 more (8 in all)"
