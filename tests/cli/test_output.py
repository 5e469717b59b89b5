"""Tables keep to the width of a terminal and are whole everywhere else; wrong arguments are refused in one line."""

from __future__ import annotations

import argparse
import io

import pytest

from drover_cli import arguments
from drover_cli.main import main
from drover_cli.output import plain, size_text, table_lines

HEADERS = ["ID", "WHERE", "SUMMARY"]
LONG = "XID 79 on GPU 0 of node r03n06: The GPU no longer answers on PCIe (fallen off the bus); only a reboot helps."
ROWS = [["0a8a04aa2140c293", "r03n06 GPU 0", LONG], ["154cf210a9377f60", "r04n03", "-"]]


def test_without_a_terminal_every_line_is_whole() -> None:
    lines = table_lines(HEADERS, ROWS)
    assert lines[2].endswith(LONG)
    assert len(lines) == 4


@pytest.mark.parametrize(("encoding", "told"), [("utf-8", "87 °C, 0.1 °C/W"), ("ascii", "87 C, 0.1 C/W")])
def test_degrees_are_shown_as_the_output_can(encoding: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    assert plain("87 degC, 0.1 °C/W") == told


@pytest.mark.parametrize("columns", [20, 40, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    lines = table_lines(HEADERS, ROWS, columns=columns)
    assert max(map(len, lines)) <= columns
    assert all(row[0][: columns - 1] in "".join(lines) for row in ROWS)


def test_a_wide_terminal_cuts_the_sentence_beside_its_line() -> None:
    lines = table_lines(HEADERS, ROWS, columns=110)
    assert lines[2].startswith("0a8a04aa2140c293  r03n06 GPU 0  XID 79 on GPU 0")
    assert lines[2].endswith("…")


def test_a_narrow_terminal_has_the_sentence_below_its_line_and_none_for_an_empty_one() -> None:
    lines = table_lines(HEADERS, ROWS, columns=80)
    assert lines[0] == "ID                WHERE"
    assert lines[3].startswith("  XID 79 on GPU 0 of node r03n06: The GPU no longer answers")
    assert lines[4] == "154cf210a9377f60  r04n03"
    assert len(lines) == 5


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (12_400_000, "12.4 MB"), (3.1e9, "3.1 GB")])
def test_sizes_have_a_unit_in_which_they_are_not_zero(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "x", "99999999999", "²"])
def test_counts_are_whole_and_bounded(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1 to"):
        arguments.count(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "x", ""])
def test_numbers_are_finite(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number"):
        arguments.finite(text)


@pytest.mark.parametrize("text", ["", "foo", "foo:", ":1", "foo:0", "foo:99999", "foo:x"])
def test_an_address_has_a_host_and_a_port(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not HOST:PORT"):
        arguments.address(text)


def test_an_address_may_be_ipv6() -> None:
    assert arguments.address("[::1]:7302") == "[::1]:7302"


def test_nothing_listens_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--collector", "127.0.0.1:1"]) == 3
    assert "127.0.0.1:1 does not answer (connection refused)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["replay", "CASE", "--policy", "bogus"], "policy 'bogus': no such preset or file; give nvidia, strict,"),
        (["export", "CASE", "--since", "1m", "--until", "2m"], "--since 1m is not before --until 2m"),
        (["simulate", "--out", "CASE", "--hours", "0"], "--hours must be more than 0"),
    ],
)
def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
