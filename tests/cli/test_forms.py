"""Lists in every form, colours only on a terminal, again and again, and the groups of `--help`."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from drover_cli import forms
from drover_cli.commands import NAMES
from drover_cli.errors import UnreachableError
from drover_cli.help import GROUPS
from drover_cli.main import main
from drover_cli.output import table_lines
from drover_core import VERSION
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

ROW = pb.NodeRow(name="n1", rack="r1", health="confirmed", reason='lost, "again"\x1b[2J')


class Fleet(FleetStandIn):
    def __init__(self, *rows: pb.NodeRow) -> None:
        self.rows, self.asked = rows, 0

    def ListNodes(self, request: Any) -> pb.NodeList:
        self.asked += 1
        if self.asked == 2:
            raise UnreachableError("it does not answer")
        if self.asked == 4:
            raise KeyboardInterrupt
        return pb.NodeList(nodes=self.rows, total=9)

    def GetStatus(self, request: Any) -> pb.Status:
        return pb.Status(fleet="ours")


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    made = Fleet(ROW)
    made.install(monkeypatch)
    return made


def test_csv_is_the_list_alone_and_notes_go_to_stderr(fleet: Fleet, capsys) -> None:
    assert main(["nodes", "-o", "csv"]) == 0
    out, err = capsys.readouterr()
    (row,) = csv.DictReader(io.StringIO(out))
    assert (row["node"], row["health"], row["pool"], row["last_seen"]) == ("n1", "confirmed", "", "never")
    assert row["why"] == 'lost, "again"\\x1b[2J'
    assert "1 of 9 shown" in err


def test_a_command_without_a_list_has_no_csv(fleet: Fleet, capsys) -> None:
    assert main(["status", "-o", "csv"]) == 2
    assert "no list" in capsys.readouterr().err
    assert main(["nodes", "-o", "csv", "--json"]) == 2


def test_json_by_both_names(fleet: Fleet, capsys) -> None:
    main(["nodes", "-o", "json"])
    assert json.loads(capsys.readouterr().out)["name"] == "n1"


@pytest.mark.parametrize("args", [("nodes", "-o", "json"), ("nodes",), ("nodes", "-o", "wide")])
def test_the_form_of_one_run_is_not_that_of_the_next(fleet: Fleet, capsys, args: tuple[str, ...]) -> None:
    main([*args])
    assert forms.csv_out() is None
    assert not forms.wide()


def test_wide_keeps_a_row_on_its_line(fleet: Fleet, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_cli.output._columns", lambda: 20)
    main(["nodes", "-o", "wide"])
    assert "n1" in (line := capsys.readouterr().out.splitlines()[2])
    assert "again" in line


HEADERS, CELLS = ["NODE", "HEALTH", "WHY"], [["n1", "confirmed", "confirmed by two"], ["n2", "healthy", "-"]]


@pytest.mark.parametrize("columns", [None, 18, 30, 100])
def test_colours_are_of_whole_cells_and_take_no_room(columns: int | None) -> None:
    plain = table_lines(HEADERS, CELLS, columns=columns)
    coloured = table_lines(HEADERS, CELLS, columns=columns, colour=True)
    assert any(f"{forms.RED}confirmed{forms.END}" in line for line in coloured)
    for colour in (forms.RED, forms.GREEN, forms.END):
        coloured = [line.replace(colour, "") for line in coloured]
    assert coloured == plain


@pytest.mark.parametrize(
    ("tty", "environment", "shown"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_colours_only_where_they_are_shown(tty: bool, environment, shown: bool, monkeypatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: tty, raising=False)
    assert forms.colours() is shown


def test_watch_goes_on_when_the_collector_does_not_answer(fleet: Fleet, capsys, monkeypatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(forms.time, "sleep", waited.append)
    assert main(["nodes", "--watch", "3"]) == 0
    out, err = capsys.readouterr()
    assert waited == [3.0, 3.0, 3.0]
    assert out.count("n1") == 2
    assert "it does not answer" in err


@pytest.mark.parametrize("given", ["0.1", "nan", "9e9"])
def test_a_watch_that_would_harm_is_refused(fleet: Fleet, given: str) -> None:
    assert main(["nodes", "--watch", given]) == 2
    assert not fleet.asked


@pytest.mark.parametrize("name", ["drain", "approve", "silence", "reboot", "backup"])
def test_nothing_that_acts_is_done_again_and_again(name: str) -> None:
    assert name not in forms.WATCHED


def test_help_has_each_command_once_and_the_version(capsys) -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for name in NAMES:
        assert out.count(f"\n  {name} ") == 1, name
    assert "\nact:\n" in out
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"drover {VERSION}\n"
