"""The chaos run's own parts, without a fleet: whose fault a missing row is, what the page says, how a network tears."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import chaos  # noqa: E402  # it lies next to the other scripts
from disruption.proxy import Proxy  # noqa: E402  # the same
from disruption.run import Row  # noqa: E402  # the same


def test_what_is_missing_is_the_fault_s_during_which_it_was_made() -> None:
    rows = [Row("a", "first", 1000), Row("b", "second", 2000)]
    chaos.blame(rows, {"missing_ms": [999, 1000, 1999, 2000, 9000], "events_missing": ["n00 at 2500"]})
    assert [(row.rows_lost, row.events_lost) for row in rows] == [(2, 0), (2, 1)]


def test_the_page_has_every_fault_and_hides_no_failure() -> None:
    good = Row("a", "cut", 1, held_s=3.0, recovered_s=1.25, seen=["a | b"])
    bad = Row("a", "dead", 2, held_s=1.0, wrong=["not so: it came back"], rows_lost=8)
    skipped = Row("a", "needs root", 3, skipped="no root")
    result = {
        "stored": {"main": {"rows": 1200, "events": 3, "acks": 40, "rows_lost": 8}}, "commit": "abc1234",
        "faults": 2, "seconds": 61.2, "load": 3.0, "drained": ["n02"], "started_again": 1,
        "messages": {"taken": 5, "again": 0}, "rows": [asdict(row) for row in (good, bad, skipped)],
    }  # fmt: skip
    page = chaos.page(result)
    assert "| cut | 3.0 s | 1.2 s | a / b | 0 | abc1234 |\n" in page
    assert "| dead | 1.0 s | never | **not so: it came back** | 8 | abc1234 |\n" in page
    assert "| needs root | | not run | no root | | abc1234 |\n" in page
    assert "| lost: rows, events | 8, 0 |\n" in page
    assert "| rows stored; events; acknowledgements | 1,200; 3; 40 |\n" in page


def test_the_issue_s_number_of_faults() -> None:
    assert len(chaos.NAMES) == len(set(chaos.NAMES))
    assert len(chaos.NAMES) >= 25


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            try:
                while data := connection.recv(1000):
                    connection.sendall(data)
            except OSError:
                pass

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def test_a_network_that_is_cut_frozen_and_torn(echo: int) -> None:
    proxy = Proxy(("127.0.0.1", echo))

    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", proxy.port), 5)

    def said(connection: socket.socket, data: bytes) -> bytes:
        connection.sendall(data)
        return connection.recv(1000)

    with connect() as open_one:
        assert said(open_one, b"a") == b"a"
        proxy.freeze()
        open_one.sendall(b"b")
        open_one.settimeout(0.2)
        with pytest.raises(TimeoutError):
            open_one.recv(1)
        with connect() as another:
            assert said(another, b"c") == b"c", "only what was open is frozen"
            proxy.tear(10)
            with pytest.raises(ConnectionError):
                for _ in range(20):
                    assert said(another, b"d") in (b"d", b"")
            assert proxy.torn == 1
        proxy.tear(0)
        proxy.weather.refuses = True
        with pytest.raises(ConnectionError), connect() as refused:  # while it connects, or after
            assert said(refused, b"e") == b"e"
    proxy.close()


def result(commit: str, *rows: Row) -> dict[str, object]:
    return {
        "stored": {"main": {"rows": 10, "events": 1, "acks": 4, "rows_lost": 0}}, "commit": commit,
        "faults": len(rows), "seconds": 61.2, "load": 3.0, "drained": [], "started_again": 1,
        "messages": {"taken": 5, "again": 0}, "rows": [asdict(row) for row in rows],
    }  # fmt: skip


def test_a_run_of_some_faults_keeps_the_other_lines_and_names_the_commit_of_each() -> None:
    first, second, last = chaos.NAMES[0], chaos.NAMES[1], chaos.NAMES[-1]
    whole = chaos.page(result("aaa", Row("a", first, 1, 1.0, 1.0), Row("a", last, 3, 3.0, 3.0), Row("a", "gone", 4)))
    page = chaos.merged(whole, result("bbb", Row("a", last, 3, 9.0, 9.0, wrong=["not so: well"])))
    assert (
        f"| {first} | 1.0 s | 1.0 s |  | 0 | aaa |\n| {last} | 9.0 s | 9.0 s | **not so: well** | 0 | bbb |\n\n" in page
    )
    assert "| rows stored; events; acknowledgements | 10; 1; 4 |\n" in page, "of the whole run"
    assert page.count("Lines of commit bbb are of a run of those 1 alone") == 1
    page = chaos.merged(page, result("ccc", Row("a", second, 2, 5.0, 5.0), Row("a", last, 3, 6.0, 6.0)))
    lines = [text.split(" | ")[0][2:] for text in page.splitlines() if text.endswith((" aaa |", " bbb |", " ccc |"))]
    assert lines == [first, second, last]
    assert "Lines of commit bbb" not in page
    assert page.count("Lines of commit ccc") == 1
    assert "all runs on one machine" in page
    with pytest.raises(ValueError, match="run all faults first"):
        chaos.merged("# an older page\n", result("ddd"))


def test_a_group_and_words_choose_faults() -> None:
    assert chaos.wanted("attack", "floods", ())
    assert chaos.wanted("attack", "floods", ("attack",))
    assert chaos.wanted("agent", "spool cut in the middle", ("Slurm", "spool cut"))
    assert not chaos.wanted("agent", "attacks are not named", ("node",))
