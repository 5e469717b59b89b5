"""Tables keep to the width of a terminal and are whole everywhere else; wrong arguments are refused in one line."""

from __future__ import annotations

import argparse
import io
import json
from concurrent import futures

import grpc
import pytest

from drover_cli import arguments
from drover_cli.main import main
from drover_cli.output import message_json, plain, print_json, say, size_text, table_lines
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server

HEADERS = ["ID", "WHERE", "SUMMARY"]
LONG = "XID 79 on GPU 0 of node r03n06: The GPU no longer answers on PCIe (fallen off the bus); only a reboot helps."
ROWS = [["0a8a04aa2140c293", "r03n06 GPU 0", LONG], ["154cf210a9377f60", "r04n03", "-"]]


def test_without_a_terminal_every_line_is_whole() -> None:
    lines = table_lines(HEADERS, ROWS)
    assert lines[2].endswith(LONG)
    assert len(lines) == 4


@pytest.mark.parametrize(("encoding", "expected"), [("utf-8", "87 °C, 0.1 °C/W"), ("ascii", "87 C, 0.1 C/W")])
def test_degrees_are_shown_as_the_output_can(encoding: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    assert plain("87 degC, 0.1 °C/W") == expected


@pytest.mark.parametrize("columns", [20, 40, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    lines = table_lines(HEADERS, ROWS, columns=columns)
    assert max(map(len, lines)) <= columns
    assert all(row[0][: columns - 1] in "".join(lines) for row in ROWS)


def test_a_wide_terminal_wraps_the_sentence_next_to_its_line() -> None:
    lines = table_lines(HEADERS, ROWS, columns=110)
    assert lines[2].startswith("0a8a04aa2140c293  r03n06 GPU 0  XID 79 on GPU 0")
    assert lines[3].startswith(" " * 32)
    assert " ".join(" ".join(lines[2:4]).split()).endswith(LONG), "all of it"


def test_a_narrow_terminal_has_the_sentence_below_its_line_and_none_for_an_empty_one() -> None:
    lines = table_lines(HEADERS, ROWS, columns=80)
    assert lines[0] == "ID                WHERE"
    assert lines[3].startswith("  XID 79 on GPU 0 of node r03n06: The GPU no longer answers")
    assert " ".join(" ".join(lines[3:5]).split()) == LONG, "all of it"
    assert lines[5] == "154cf210a9377f60  r04n03"
    assert len(lines) == 6


def test_what_has_no_room_stands_below_with_its_name() -> None:
    headers = ["ID", "KIND", "WHERE", "FOR", "WANTS", "SUMMARY"]
    rows = [
        ["9d3f75fc1058c3a9", "memory", "r02n03 GPU 2", "3 min", "drain", LONG],
        ["x", "link", "r1", "9 s", "-", "-"],
    ]
    lines = table_lines(headers, rows, columns=42)
    assert lines[0] == "ID                KIND    WHERE"
    assert lines[3].startswith("  for 3 min; wants drain; XID 79 on GPU 0")
    assert lines[-1] == "  for 9 s"


def test_a_sentence_is_wrapped_between_words_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    say(f"  do: {LONG}", 6)
    assert capsys.readouterr().out == f"  do: {LONG}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    say("  do: Drain the node at once, job-5001 too, and reset it.", 6)
    assert capsys.readouterr().out.splitlines() == [
        "  do: Drain the node at once, job-5001",
        "      too, and reset it.",
    ]


def test_times_in_sentences_have_no_fractions() -> None:
    assert plain("Out since 2026-11-22T23:32:09.807Z, by kim") == "Out since 2026-11-22T23:32:09Z, by kim"


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
        (["incident"], "no command 'incident'; did you mean `drover incidents`?"),
        (["frobnicate"], "no command 'frobnicate'; `drover --help` lists all"),
        (["incidents", "--sinse", "1d"], "incidents takes no '--sinse'; `drover incidents --help` lists what it takes"),
        ([], "give a command: `drover --help` lists them"),
    ],
)
def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


def test_json_has_no_noise_and_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": 25.650000000000002, "b": ["31.5 degC", (1, None, True)], "c": 1_800_000_000_123})
    read = json.loads(capsys.readouterr().out)
    assert read == {"a": 25.65, "b": ["31.5 °C", [1, None, True]], "c": 1_800_000_000_123}
    rack = message_json(pb.RackHeat(name="r1", inlet_c=24.5), type="rack")
    assert (rack["type"], rack["name"], rack["inlet_c"], rack["gpu_max_c"]) == ("rack", "r1", 24.5, None)
    assert rack.keys() == {"type", *(field.name for field in pb.RackHeat.DESCRIPTOR.fields)}
    job = message_json(pb.JobRow(job="j", since_ms=1_800_000_000_123))
    assert (job["since_ms"], job["ended_ms"], job["incidents"]) == (1_800_000_000_123, None, [])


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, 1),
        (grpc.StatusCode.PERMISSION_DENIED, 1),
        (grpc.StatusCode.UNAUTHENTICATED, 1),
        (grpc.StatusCode.INVALID_ARGUMENT, 2),
        (grpc.StatusCode.UNAVAILABLE, 3),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 3),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 3),
        (grpc.StatusCode.INTERNAL, 3),
        (grpc.StatusCode.NOT_FOUND, 4),
    ],
)
def test_a_script_sees_by_the_exit_code_why_nothing_was_done(
    code: grpc.StatusCode, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fleet(FleetServicer):
        def ListRisk(self, request: pb.RiskRequest, context: grpc.ServicerContext) -> pb.RiskList:
            context.abort(code, "why not")
            raise AssertionError

    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_FleetServicer_to_server(Fleet(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert main(["risk", "--collector", f"127.0.0.1:{port}"]) == exit_code
    finally:
        server.stop(0)
    assert "why not" in capsys.readouterr().err or exit_code == 3
