"""The docs are in step with the code: every metric, setting, command, XID, detector and policy preset."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from drover_cli.commands import NAMES
from drover_collector.detectors import DETECTORS
from drover_collector.policy.policy import PRESETS

ROOT = Path(__file__).resolve().parents[1]


def _pages() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {name: make() for name, make in module.PAGES.items()}


@pytest.mark.parametrize(
    "name", ["metrics.md", "settings.md", "commands.md", "fleet_api.md", "xids.md", "sources.md", "probes.md"]
)
def test_reference_pages_follow_the_code(name: str) -> None:
    written = (ROOT / "docs" / name).read_text("utf-8")
    assert written == _pages()[name], f"docs/{name} is old: run .venv/bin/python docs/generate.py"


def test_every_detector_is_documented() -> None:
    text = (ROOT / "docs/detectors.md").read_text("utf-8")
    for detector in DETECTORS:
        assert re.search(rf"^#+ .*\b{detector.name}\b", text, re.MULTILINE | re.IGNORECASE), detector.name


def test_every_preset_is_documented() -> None:
    text = (ROOT / "docs/policy.md").read_text("utf-8")
    for preset in PRESETS:
        assert f"`{preset}`" in text


def test_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for name in NAMES:
        assert f"`{name}`" in readme or f"drover {name}" in readme, name


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), ids=lambda p: p.name)
def test_files_and_make_targets_named_in_docs_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in targets, f"{page.name}: make {target}"
    for name in re.findall(r"`((?:docs|tests|benchmarks|proto|agent|collector|dashboard|cli|ansible)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page.name}: {name}"
