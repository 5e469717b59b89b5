"""Log lines in the journal's own protocol, held against a reader of it; the real journal: `make test-rollout`."""

from __future__ import annotations

import io
import logging
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_core.logs import (
    MAX_FIELD_BYTES,
    JournalHandler,
    configure,
    is_journal,
)


def fields(data: bytes) -> dict[str, str]:
    """As journald reads them: NAME, newline, eight bytes of length, value, newline."""
    found = {}
    while data:
        name, _, rest = data.partition(b"\n")
        (size,) = struct.unpack("<Q", rest[:8])
        found[name.decode()], data = rest[8 : 8 + size].decode(), rest[8 + size + 1 :]
    return found


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "socket"))
        made.settimeout(20)
        yield made


@pytest.fixture
def logger(tmp_path: Path, journal: socket.socket) -> Iterator[logging.Logger]:
    made = logging.Logger("drover_agent.uplink.stream")
    handler = JournalHandler(logging.StreamHandler(), str(tmp_path / "socket"))
    made.addHandler(handler)
    yield made
    handler.close()


@pytest.mark.parametrize(
    ("level", "priority"),
    [("debug", "7"), ("info", "6"), ("warning", "4"), ("error", "3"), ("critical", "2")],
    ids=lambda value: value,
)
def test_a_line_has_its_fields(logger: logging.Logger, journal: socket.socket, level: str, priority: str) -> None:
    getattr(logger, level)("node %s", "r01n01")
    found = fields(journal.recv(1 << 20))
    assert found["MESSAGE"] == "node r01n01"
    assert found["PRIORITY"] == priority
    assert found["LOGGER"] == "drover_agent.uplink.stream"
    assert Path(found["CODE_FILE"]) == Path(__file__)
    assert found["CODE_FUNC"] == "test_a_line_has_its_fields"
    assert found["THREAD_NAME"] == "MainThread"


def test_what_comes_from_outside_adds_no_fields(logger: logging.Logger, journal: socket.socket) -> None:
    logger.warning("bad name %s", "x\nPRIORITY=0\nMESSAGE=all is well\udcff")
    found = fields(journal.recv(1 << 20))
    assert found["PRIORITY"] == "4"
    assert found["MESSAGE"] == "bad name x\nPRIORITY=0\nMESSAGE=all is well?"


def test_an_exception_is_reported_whole_and_a_long_line_is_cut(logger: logging.Logger, journal: socket.socket) -> None:
    try:
        raise ValueError("inner")
    except ValueError:
        logger.exception("it failed")
    text = fields(journal.recv(1 << 20))["MESSAGE"]
    assert text.startswith("it failed\nTraceback") and text.endswith("ValueError: inner")
    logger.info("x" * (3 * MAX_FIELD_BYTES))
    assert len(fields(journal.recv(1 << 20))["MESSAGE"]) == MAX_FIELD_BYTES


def test_a_journal_that_takes_nothing_holds_nobody_up(tmp_path: Path, journal: socket.socket) -> None:
    text = io.StringIO()
    logger = logging.Logger("drover_agent.uplink.stream")
    handler = JournalHandler(logging.StreamHandler(text), str(tmp_path / "socket"))
    logger.addHandler(handler)
    for number in range(2000):  # its queue holds some hundred datagrams, and nobody reads
        logger.info("line %d", number)
    kept = 0
    journal.setblocking(False)
    while kept < 2000:
        try:
            journal.recv(1 << 20)
        except BlockingIOError:
            break
        kept += 1
    assert 0 < kept < 2000
    assert text.getvalue().count("line ") == 2000 - kept
    handler.close()


def test_the_journal_is_used_where_systemd_says_so_and_nobody_redirected_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    there = os.fstat(write)
    try:
        assert is_journal(write, {"JOURNAL_STREAM": f"{there.st_dev}:{there.st_ino}"})
        assert not is_journal(write, {"JOURNAL_STREAM": f"{there.st_dev}:{there.st_ino + 1}"})
        assert not is_journal(write, {})
    finally:
        os.close(read)
        os.close(write)
    assert not is_journal(write, {"JOURNAL_STREAM": f"{there.st_dev}:{there.st_ino}"})
    root = logging.getLogger()
    assert JournalHandler(logging.StreamHandler()).formatter is not None  # else basicConfig would give it its own
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure("info", {})
    root.info("hello")
    assert capsys.readouterr().err.endswith(" INFO root: hello\n")
