"""What `drover demo` is started with: refused with one line before anything runs, or made to work."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from drover_cli.commands import demo
from drover_cli.main import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--faults", "missing.json"], "there is no file"),
        (["--dir", "a_file"], "choose a folder that can be written"),
        (["--dir", "full"], "is not empty"),
        (["--seconds", "-5"], "--seconds must be 0 or more"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_runs(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    (Path("full") / "it").mkdir(parents=True)
    monkeypatch.setattr(demo._Demo, "run", lambda _: pytest.fail("it began"))
    assert main(["demo", *words]) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1


def test_a_folder_that_is_there_and_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")  # root, as whom tests may run, may write everywhere

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    monkeypatch.setattr(demo._Demo, "run", lambda _: pytest.fail("it began"))
    assert main(["demo", "--dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"drover: {tmp_path}: Permission denied; choose a folder that can be written\n"


def test_a_file_of_faults_is_found_from_where_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("faults.json").write_text('{"faults": []}')
    found: list[str] = []

    def run(of: demo._Demo) -> int:
        found.append(of.args.faults)
        return 0

    monkeypatch.setattr(demo._Demo, "run", run)
    assert main(["demo", "--faults", "faults.json"]) == 0
    assert found == [str(tmp_path / "faults.json")], "the fleet runs in another folder"


def test_two_demos_that_start_together_take_different_ports() -> None:
    program = "import drover_cli.demo.processes as p; print(p.free_port(27302), flush=True); input()"
    ports = []
    running = []
    try:
        for _ in range(2):  # neither listens yet
            one = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            running.append(one)
            assert one.stdout is not None
            ports.append(one.stdout.readline().strip())
    finally:
        for one in running:
            one.communicate("\n", timeout=120)
    assert len(set(ports)) == 2


def test_a_demo_that_is_ended_early_says_how_long_a_fault_had() -> None:
    """A hang is reported after 90 s: one that began 12 s ago was not missed."""
    hang = {"kind": "hang", "cause": "rank_stopped", "after_s": 12}
    result = {"found": 1, "injected": 2, "false_incidents": 0, "samples": 3200, "missed": [hang], "false": []}
    assert demo.summary_lines(result) == [
        "1 of 2 faults found, 0 false incidents, 3,200 samples",
        "not found  hang, rank_stopped, in the 12 s since it was injected",
    ]
