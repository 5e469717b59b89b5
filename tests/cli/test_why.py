"""`drover why`: one sentence first, nothing raw, what cannot be read is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from drover_cli.main import main

TRACE = "[rank1]: Traceback (most recent call last):\n[rank1]: \x1b[31mValueError: bad \x1b]0;x\x07shape\x1b[0m\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.log").write_text("rank 1 on n07, local rank 1\n" + TRACE)
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    (tmp_path / "comm_lib_trace_rank_0").write_bytes(b"")
    return tmp_path


def test_the_sentence_stands_first(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(job)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "the program failed on rank 1 on node n07, GPU 1: ValueError: bad shape"
    assert "class program" in shown and "comm_lib_trace_rank_0: it is empty" in shown
    assert "\x1b" not in shown and "\x07" not in shown


def test_json(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(job / "job.log"), "--json", "--exit", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["failure"], found["rank"], found["node"], found["gpu"]) == ("program", 1, "n07", 1)
    assert found["evidence"][0]["text"] == "ValueError: bad shape" and found["ranks"] == [1]


def test_an_unknown_end_is_the_answer_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.log").write_text("step 1 loss 2.0\n")
    assert main(["why", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("the evidence does not say why")
    assert main(["why", str(tmp_path), "--signal", "SEGV"]) == 0
    assert "class program" in capsys.readouterr().out


def test_errors_of_nodes_from_a_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "job.log"
    log.write_text("srun: error: n08: task 3: Killed\n")
    events = tmp_path / "case" / "events.jsonl"
    events.parent.mkdir()
    row = {"ts": 0, "node": "n08", "gpu": 1, "kind": "xid", "code": "79", "message": "GPU has fallen off the bus"}
    events.write_text(json.dumps(row) + "\n")
    assert main(["why", str(log), "--case", str(events.parent)]) == 0
    assert capsys.readouterr().out.startswith("the GPU of rank 3 on node n08 failed")
    assert main(["why", str(log), "--case", str(events.parent), "--at", "2026-11-28T02:00:00Z"]) == 0
    assert "outside the hour before" in capsys.readouterr().out
    events.write_text(json.dumps({**row, "forgeable": True}) + "\n")
    assert main(["why", str(log), "--case", str(events.parent)]) == 0
    assert "failed" not in capsys.readouterr().out.splitlines()[0]
    events.write_text("[]\n")
    assert main(["why", str(log), "--events", str(events)]) == 2
    assert "not in the form of a case's events.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, error",
    [
        (["no-such-file"], "there is no such file or folder"),
        (["."], "no file to read"),
        (["/dev/null", "--signal", "FOO"], "there is no such"),
        ([".", "--tail", "0"], "give 1 to 256 MiB"),
        (["/dev/null", "--signal", "\u00b2"], "there is no such"),
        (["a.log", "--signal", "\u00b2"], "there is no such signal"),
        (["a.log", "--exit", "256"], "an exit code is 0 to 255"),
        (["a.log", "--exit", "-9"], "an exit code is 0 to 255"),
        (["a.log", "--events", "/dev/zero"], "it is no regular file"),
        (["a.log", "--events", "fifo"], "it is no regular file"),
        (["a\x1b]0;x\x07\nb"], r"a\x1b]0;x\x07\nb: there is no such"),
        (["a.log", "--signal", "\x1b[31m"], r"--signal \x1b[31m"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "a.log" in words:
        Path("a.log").write_text("step 1 loss 2\n")
        os.mkfifo("fifo")
    assert main(["why", *words]) == 2
    shown = capsys.readouterr().err
    assert error in shown and shown.count("\n") == 1


def test_only_the_tail_of_a_large_log_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "job.log"
    with log.open("wb") as file:
        file.write(b"RuntimeError: in the part that is not read\n")
        file.truncate(3 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\nKeyError: 'x'\n")
    assert main(["why", str(log), "--tail", "1"]) == 1
    assert "neither text nor a dump" in capsys.readouterr().out  # zeros
    log.write_bytes(b"RuntimeError: old\n" + b"step 1 loss 2\n" * 100_000 + b"KeyError: 'x'\n")
    assert main(["why", str(log), "--tail", "1"]) == 0
    shown = capsys.readouterr().out
    assert "KeyError" in shown and "old" not in shown and "only its last 1 MiB were read" in shown


def test_links_out_of_a_folder_are_not_followed(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = job.parent / "secret.log"
    secret.write_text("MemoryError\n")
    (job / "link.log").symlink_to(secret)
    assert main(["why", str(job), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failure"] == "program"


def test_what_cannot_be_read_is_said_and_the_rest_is_read(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root can read all, so the system's refusals are put in its place."""
    (job / "secret.log").write_text("x\n")
    (job / "closed").mkdir()
    really_open, really_scan = Path.open, os.scandir

    def refuse_open(path: Path, *args: Any, **more: Any) -> Any:
        if path.name == "secret.log":
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, *args, **more)

    def refuse_scan(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return really_scan(path)

    monkeypatch.setattr(Path, "open", refuse_open)
    monkeypatch.setattr(os, "scandir", refuse_scan)
    assert main(["why", str(job)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("the program failed on rank 1")
    assert "secret.log: it cannot be read (Permission denied)" in shown
    assert "closed: it cannot be read (Permission denied)" in shown
    assert main(["why", str(job / "secret.log")]) == 2
    assert "nothing else could be read" in capsys.readouterr().err


def test_a_bad_dump_is_not_the_end(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = '{"profiling_name": "nccl:x", "process_group": ["0"], "collective_seq_id": "\u00b2"}'
    groups = '{"0": {"ranks": ["abc", 1000000000000]}}'
    (job / "t_1.json").write_text(f'{{"pg_config": {groups}, "entries": [{entry}]}}')
    (job / "t_2.json").write_text('{"entries": [' + "[" * 100_000)
    assert main(["why", str(job)]) == 0
    assert "t_2.json: it is no JSON" in capsys.readouterr().out


def test_what_is_read_of_all_files_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from drover_cli.commands import why
    from drover_core.jobs import files

    monkeypatch.setattr(why, "DUMPS_MIB", 1)
    monkeypatch.setattr(why, "ALL_MIB", 1)
    monkeypatch.setattr(files, "MAX_LINES", 1000)
    dump = b'{"entries": [], "x": "' + b"a" * 700_000 + b'"}'
    for rank in range(2):
        (tmp_path / f"t_{rank}.json").write_bytes(dump)
        (tmp_path / f"brace_{rank}.log").write_bytes(b"{\n" + b"a\n" * 500_000 + b"KeyError: 'x'\n")
    (tmp_path / "small.log").write_text("one\ntwo\n")
    monkeypatch.setattr(files, "MAX_VALUES", 100)
    (tmp_path / "t_2.json").write_text(json.dumps({"entries": [{"profiling_name": "x", "process_group": [""]}] * 3}))
    assert main(["why", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "t_2.json: all dumps together hold too much" in shown
    assert "t_1.json: it is larger than 64 MiB, or all dumps than 1 MiB" in shown and "t_0.json" not in shown
    assert "brace_0.log: only its last 498 lines were read" in shown and "small.log" not in shown
    assert shown.count("KeyError: 'x'") == 3  # the sentence, and both logs
