"""`drover-collector config` and `check`: what is wrong is one line and exit code 2."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from drover_collector.main import main
from testbed.collector_process import START_S, write


def said(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err.strip()
    assert "\n" not in text
    assert text.startswith("drover-collector: ")
    return text


def test_config_prints_a_sample_that_check_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    write(tmp_path)
    path = tmp_path / "sample.toml"
    path.write_text(text.replace("/etc/drover/fleet.toml", f"{tmp_path}/fleet.toml"))
    assert main(["check", "--config", str(path)]) == 0
    assert "2 nodes, 4 GPUs" in capsys.readouterr().out
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("[detekt]\n", "unknown key; did you mean detect?"),
        ("[detect]\nlag_s = 'x'", "detect.lag_s: must be a number"),
        ('[policy]\npreset = "wild"', "policy.preset: must be one of"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, says: str
) -> None:
    for command in ("check", "run"):
        assert main([command, "--config", str(write(tmp_path, extra))]) == 2
        assert says in said(capsys)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("chdb://relative/path", "needs an absolute path"),
        ("chdb:///x?databse=y", "'databse' is not known here"),
        ("clickhouse://u:geheim@:8123/drover", "has no host"),
        ("clickhouse://u:geheim@host/dro-ver", "is not a name for a database"),
        ("mysql://u:geheim@host/x", "not a store"),
    ],
)
def test_a_url_that_is_none_is_reported_by_check_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, says: str
) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace(f"chdb://{tmp_path}/store", url))
    for command in ("check", "run"):
        assert main([command, "--config", str(path)]) == 2
        text = said(capsys)
        assert says in text
        assert "geheim" not in text


def test_more_to_keep_free_than_the_disk_has(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace("[store]", "[store]\nkeep_free_bytes = 1000000000000000000"))
    done = subprocess.run(
        [sys.executable, "-m", "drover_collector.main", "run", "--config", str(path)],
        capture_output=True, text=True, timeout=START_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "store.keep_free_bytes: 1000000000000000000 is more than the store's disk has" in done.stderr


def test_check_says_what_run_would_say_of_the_stores_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    for url, says in (
        (f"chdb://{tmp_path}/fleet.toml", "fleet.toml is not a folder"),
        (f"chdb://{tmp_path}/fleet.toml/store", "fleet.toml is not a folder"),
    ):
        write(tmp_path)
        path.write_text(path.read_text().replace(f"chdb://{tmp_path}/store", url))
        assert main(["check", "--config", str(path)]) == 2
        assert f"{says}; set store.url to a folder that this user may write" in said(capsys)
    write(tmp_path)
    (tmp_path / "store.restoring").mkdir()
    assert main(["check", "--config", str(path)]) == 2
    assert "a restore of it is under way or was stopped" in said(capsys)
    (tmp_path / "store.restoring").rmdir()
    path.write_text(path.read_text().replace("[store]", "[store]\nkeep_free_bytes = 1000000000000000000"))
    assert main(["check", "--config", str(path)]) == 2
    assert "is more than the store's disk has" in said(capsys)
    write(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, as which tests may run, may write anywhere
    assert main(["check", "--config", str(path)]) == 2
    assert f"{tmp_path}/store: this user may not write in {tmp_path}; set store.url to a folder" in said(capsys)
    assert not (tmp_path / "store").exists(), "nothing was made"


def test_check_next_to_a_running_collector_says_who_has_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    (tmp_path / "store").mkdir()
    with (tmp_path / "store" / "drover.lock").open("w+") as lock:
        lock.write("4242")
        lock.flush()
        assert main(["check", "--config", str(path)]) == 0
        assert "but" not in capsys.readouterr().out, "left by one that has ended"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["check", "--config", str(path)]) == 0, "settings are tried before a restart"
        assert "but the store is open in process 4242" in capsys.readouterr().out


def test_check_says_that_the_stores_disk_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 20, total=1 << 40))
    assert main(["check", "--config", str(write(tmp_path))]) == 0
    assert "but only 3 MB are free on the store's disk" in capsys.readouterr().out


def test_missing_files_are_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(tmp_path / "none.toml")]) == 2
    assert "check the path given with --config" in said(capsys)
    path = write(tmp_path)
    (tmp_path / "fleet.toml").unlink()
    assert main(["check", "--config", str(path)]) == 2
    assert "write the nodes that should exist there" in said(capsys)


def test_a_broken_policy_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[[rules]]\naction = 'explode'\n")
    assert main(["check", "--config", str(write(tmp_path, f'[policy]\npath = "{policy}"'))]) == 2
    assert "rules[0].action: must be one of" in said(capsys)


@pytest.mark.parametrize(
    ("ago_s", "remark"), [(3600, ""), (-60, ""), (1830 * 86_400, "1830 days ago"), (-86_400, "1.0 ")]
)
def test_a_clock_that_is_far_from_the_store_s_last_write_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ago_s: float, remark: str
) -> None:
    path = write(tmp_path)
    inserts = tmp_path / "store" / "inserts" / "drover"
    inserts.mkdir(parents=True)
    os.utime(inserts, times=(time.time() - ago_s,) * 2)
    assert main(["check", "--config", str(path)]) == 0
    remarks = capsys.readouterr().out.splitlines()[1:]
    assert [line for line in remarks if "last written" in line] == ([remarks[-1]] if remark else [])
    assert remark in remarks[-1] if remark else True
