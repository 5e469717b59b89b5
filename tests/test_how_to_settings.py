"""Settings that pages of docs/how-to show are taken by the program that they are for."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from drover_agent.config import AgentConfig
from drover_collector.config import CollectorConfig
from drover_core.settings import load

PAGES = Path(__file__).resolve().parents[1] / "docs/how-to"
FILE = re.compile(r"^# (\S+\.(?:toml|yml|yaml))(?:, .*)?$", re.M)
OF_COLLECTOR = re.compile(r"\[\[?(rest|scrape|export|notify|store|act|policy|detect|metrics|webhooks)\b")
LEAST = {"standards.md": 5, "without-agents.md": 3, "notify.md": 4, "cluster.md": 2}  # blocks that are found, at least


def _blocks(text: str) -> Iterator[str]:
    """Yield indented blocks, without their indent."""
    for found in re.finditer(r"(?:^    .*\n|^\n(?=    ))+", text, re.M):
        yield re.sub(r"^    ", "", found[0], flags=re.M).strip("\n") + "\n"


def _files(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, its text) of what a page shows: by its first line, or as settings of the collector."""
    for block in _blocks(page.read_text("utf-8")):
        parts = FILE.split(block)
        if OF_COLLECTOR.match(parts[0]):
            yield "collector.toml", parts[0]
        yield from zip(parts[1::2], parts[2::2], strict=True)


SHOWN = [(page.name, name, text) for page in sorted(PAGES.glob("*.md")) for name, text in _files(page)]
SETTINGS = {"collector.toml": CollectorConfig, "agent.toml": AgentConfig}


@pytest.mark.parametrize(("page", "name", "text"), [each for each in SHOWN if each[1] in SETTINGS])
def test_settings_are_known_and_in_range(page: str, name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    shown = tomllib.loads(text)
    assert shown, page
    load(SETTINGS[name], tmp_path / name)


@pytest.mark.parametrize(("page", "least"), LEAST.items())
def test_the_pages_about_other_systems_show_settings(page: str, least: int) -> None:
    assert sum(each[0] == page and each[1] == "collector.toml" for each in SHOWN) >= least


@pytest.mark.parametrize(("page", "name", "text"), [each for each in SHOWN if each[1].endswith((".yml", ".yaml"))])
def test_files_of_other_systems_are_yaml(page: str, name: str, text: str) -> None:
    assert isinstance(yaml.safe_load(text), dict), page


@pytest.mark.system
@pytest.mark.parametrize(("page", "name", "text"), [each for each in SHOWN if each[1] == "prometheus.yml"])
def test_prometheus_takes_its_files(page: str, name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", str(tmp_path / name)], capture_output=True, text=True
    )
    assert done.returncode == 0, f"{page}: {done.stderr}"
