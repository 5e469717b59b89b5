from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from drover_cli.doctor import running
from drover_cli.main import main
from drover_core.model import runbooks
from drover_core.model.events import IncidentKind

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("asked", ["hang", "DroverBlind", "droverblind", "docs/runbooks/DroverBlind.md"])
def test_a_page_by_its_name_however_it_is_written(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runbook", asked]) == 0
    name = "hang" if asked == "hang" else "DroverBlind"
    assert capsys.readouterr().out == (ROOT / f"docs/runbooks/{name}.md").read_text("utf-8")


def test_all_there_are_kinds_of_incidents_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runbook", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)["runbooks"]
    assert set(map(str, IncidentKind)) <= set(names)
    assert "README" not in names
    alerts = [name for name in names if name.startswith("Drover")]
    assert alerts == names[-len(alerts) :]


def test_one_that_is_not_there_names_those_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runbook", "DroverBlnd"]) == 4
    assert capsys.readouterr().err == "drover: there is no run book 'DroverBlnd': DroverBlind?\n"
    assert main(["runbook", "qqq"]) == 4
    assert "`drover runbook` lists them" in capsys.readouterr().err


def test_what_the_doctor_names_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(running.__file__).read_text("utf-8")
    named = {words.split('"')[0] for words in text.split("drover runbook ")[1:]}
    assert len(named) > 10
    for name in sorted(named):
        assert main(["runbook", name]) == 0, name
    assert capsys.readouterr().out


def test_pages_are_in_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=120)
    with zipfile.ZipFile(next(tmp_path.glob("drover-*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    inside = tmp_path / "site/drover_core/runbooks"
    assert {page.name for page in inside.glob("*.md")} == {page.name for page in (ROOT / "docs/runbooks").glob("*.md")}
    monkeypatch.setattr(runbooks, "PLACES", (inside, tmp_path / "no checkout"))
    assert main(["runbook", "hang"]) == 0
