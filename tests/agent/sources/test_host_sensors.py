"""Inlet temperature and fans: from hwmon in folders, and by IPMI through programs that a test puts in place."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from drover_agent.sources.base import Reading
from drover_agent.sources.host import ipmi as ipmi_module
from drover_agent.sources.host.ipmi import Ipmi, sensors, values_of
from drover_agent.sources.host.sensors import METRICS, SensorsSource
from drover_core.metrics.catalog import BY_NAME, Absent
from testbed.waiting import wait_until

T = 1_800_000_000_000
CASES = sorted((Path(__file__).parents[2] / "cases/agent/ipmi").iterdir())


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


class Board:
    """A machine with /dev/ipmi0 and a program of the given name that does what `script` says."""

    def __init__(self, folder: Path, script: str = "", program: str = "ipmitool", *, device: bool = True) -> None:
        self.folder, self.sys = folder, folder / "sys"
        if device:
            write(folder, "dev/ipmi0", "")
        if script:
            write(folder, f"bin/{program}", f"#!/bin/sh\n{script}\n").chmod(0o755)

    def ipmi(self, limit_s: float = 20.0) -> Ipmi:
        return Ipmi(self.folder / "dev", path=str(self.folder / "bin"), limit_s=limit_s)

    def source(self, limit_s: float = 20.0) -> SensorsSource:
        return SensorsSource("n1", self.sys, self.ipmi(limit_s))


def values(reading: Reading) -> dict[str, float]:
    return {name: value for _, row in reading.rows for name, value in row.items()}


def absent(reading: Reading) -> dict[str, Absent]:
    return {name: reason for _, name, reason in reading.absent}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_boards_say(case: Path, tmp_path: Path) -> None:
    expected = json.loads((case / "expected.json").read_text())
    board = Board(tmp_path, f"cat {case / 'input.txt'}", expected["program"])
    source = board.source()
    try:
        wait_until(lambda: source.read(T).rows or absent(source.read(T))["inlet_temp_c"] is not Absent.UNSUPPORTED
                   or source._ipmi._process is None, "the board's answer")  # fmt: skip
        reading = source.read(T)
        assert values(reading) == expected["values"]
        assert absent(reading).keys() == set(METRICS) - expected["values"].keys()
    finally:
        source.close()


def test_hwmon_comes_first_and_the_board_is_not_asked_where_it_reports_everything(tmp_path: Path) -> None:
    board = Board(tmp_path, f"touch {tmp_path}/asked")
    hwmon = "class/hwmon/hwmon1"
    write(board.sys, "class/hwmon/hwmon0/temp1_label", "CPU Package\n")
    write(board.sys, "class/hwmon/hwmon0/temp1_input", "88000\n")
    write(board.sys, f"{hwmon}/temp2_label", "Inlet Temp\n")
    write(board.sys, f"{hwmon}/temp2_input", "24500\n")
    for number, rpm, alarm in ((1, 5200, 0), (2, 4100, 0), (3, 0, 1), (4, 0, 0)):
        write(board.sys, f"{hwmon}/fan{number}_input", f"{rpm}\n")
        write(board.sys, f"{hwmon}/fan{number}_alarm", f"{alarm}\n")
    source = board.source()
    reading = source.read(T)
    assert values(reading) == {"inlet_temp_c": 24.5, "fan_min_rpm": 0, "fans_failed": 1}
    write(board.sys, f"{hwmon}/fan3_alarm", "0\n")
    assert values(source.read(T + 10_000)) == {"inlet_temp_c": 24.5, "fan_min_rpm": 4100, "fans_failed": 0}
    source.close()
    assert not (tmp_path / "asked").exists()


def test_a_sensor_that_cannot_be_read_is_an_error_and_no_number(tmp_path: Path) -> None:
    board = Board(tmp_path, device=False)
    write(board.sys, "class/hwmon/hwmon0/temp1_label", "inlet\n")
    write(board.sys, "class/hwmon/hwmon0/temp1_input", "n/a\n")
    write(board.sys, "class/hwmon/hwmon0/fan1_input", "\n")
    reading = board.source().read(T)
    assert (values(reading), absent(reading)) == ({}, dict.fromkeys(METRICS, Absent.ERROR))


@pytest.mark.parametrize("device", [True, False], ids=["no program", "no device"])
def test_what_is_not_there_is_unsupported(tmp_path: Path, device: bool) -> None:
    reading = Board(tmp_path, device=device).source().read(T)
    assert (reading.rows, absent(reading)) == ([], dict.fromkeys(METRICS, Absent.UNSUPPORTED))


def test_a_device_that_may_not_be_opened_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(tmp_path, "exit 0")
    tmp_path.chmod(0o755)
    (tmp_path / "dev/ipmi0").chmod(0)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may always
    reading = board.source().read(T)
    assert absent(reading) == dict.fromkeys(METRICS, Absent.NO_PERMISSION)
    assert "may not be opened" in reading.inventory["sensors.trouble"]


def test_a_program_that_hangs_is_killed_with_its_children_and_asked_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipmi_module, "FIRST_WAIT_S", 0.01)
    board = Board(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; wait")
    source = board.source(limit_s=0.5)
    source.read(T)
    try:
        wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip(), "a start")
        child = int((tmp_path / "child").read_text())
        wait_until(lambda: absent(source.read(T)) == dict.fromkeys(METRICS, Absent.TIMEOUT), "the limit")
        wait_until(lambda: not _runs(child), "the end of its child")
        wait_until(lambda: source.read(T) and source._ipmi._process is None, "its own end")
        assert absent(source.read(T)) == dict.fromkeys(METRICS, Absent.TIMEOUT)
        write(tmp_path, "bin/ipmitool", "#!/bin/sh\necho Inlet Temp,21,degrees C,ok\n")
        source._ipmi._started_s = time.monotonic() - ipmi_module.EVERY_S
        wait_until(lambda: values(source.read(T)) == {"inlet_temp_c": 21}, "the board that answers again")
    finally:
        source.close()


def test_a_program_that_writes_without_end_is_cut_off_and_what_it_said_first_counts(tmp_path: Path) -> None:
    source = Board(tmp_path, "echo Inlet Temp,21,degrees C,ok; exec yes").source(limit_s=1000.0)
    try:
        wait_until(lambda: values(source.read(T)) == {"inlet_temp_c": 21}, "its end, long before the limit")
    finally:
        source.close()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_an_answer_stands_until_the_next_one_and_no_longer(tmp_path: Path) -> None:
    board = Board(tmp_path, "echo Inlet Temp,21,degrees C,ok")
    source = board.source()
    try:
        assert values(source.read(T)) == {"inlet_temp_c": 21}
        write(tmp_path, "bin/ipmitool", "#!/bin/sh\necho no BMC; exit 1\n")
        assert values(source.read(T + 10_000)) == {"inlet_temp_c": 21}
        source._ipmi._started_s = time.monotonic() - ipmi_module.EVERY_S
        wait_until(lambda: absent(source.read(T)).get("inlet_temp_c") is Absent.ERROR, "the refusal")
        assert not source.read(T).rows
    finally:
        source.close()


def test_closing_ends_a_program_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipmi_module, "FIRST_WAIT_S", 0.01)
    source = Board(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000").source()
    source.read(T)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "its start")
    source.close()
    assert not _runs(int((tmp_path / "pid").read_text()))


def test_values_lie_within_the_catalogs_bounds() -> None:
    for case in CASES:
        for name, value in values_of(sensors((case / "input.txt").read_text())).items():
            assert BY_NAME[name].low <= value <= BY_NAME[name].high


def test_garbage_is_no_sensor() -> None:
    assert values_of(sensors("Inlet Temp,nan,degrees C,ok\nFan 1,inf,RPM,ok\n")) == {"fans_failed": 0.0}
    assert values_of(sensors(",,,\n,\n" + "x" * 5000 + "\nInlet Temp,nan?,degrees C,ok\nFan,1e9,RPM,\n")) == {}


def test_the_real_machine_can_be_asked() -> None:
    source = SensorsSource("n1")
    try:
        reading = source.read(T)
        assert values(reading).keys() | absent(reading).keys() == set(METRICS)
        assert Path("/dev/ipmi0").exists() or set(absent(reading).values()) == {Absent.UNSUPPORTED}
    finally:
        source.close()
