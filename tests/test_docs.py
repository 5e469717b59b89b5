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
REFERENCE = [
    "metrics.md", "settings.md", "commands.md", "xids.md", "sources.md", "probes.md", "events.md", "fleet-api.md",
    "rest.md", "dcgm-names.md",
]  # fmt: skip
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def _pages() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {name: make() for name, make in module.PAGES.items()}


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_pages_follow_the_code(name: str) -> None:
    written = (ROOT / "docs/reference" / name).read_text("utf-8")
    assert written == _pages()[name], f"docs/reference/{name} is old: run .venv/bin/python docs/generate.py"


def test_no_reference_page_is_left_out() -> None:
    assert set(_pages()) == set(REFERENCE)


def test_the_walks_name_functions_that_are_there() -> None:
    rows = re.findall(
        r"^\|[^|\n]*\| `(\S+?\.py)` \| ([^|]+) \|", (ROOT / "docs/explanation/walks.md").read_text(), re.M
    )
    caches = re.findall(r"^\| `(\S+?\.py)` `(\w+)`", (ROOT / "docs/explanation/walks.md").read_text(), re.M)
    assert (len(rows), len(caches)) == (27 + 22, 2)
    for path, text in [*rows, *((path, f"`{name}`") for path, name in caches)]:
        program = (ROOT / path).read_text("utf-8")
        for name in re.findall(r"`(\w+)`", text):
            assert re.search(rf"\b{name}\b", program), f"{path} has no {name}"


def test_every_detector_is_documented() -> None:
    text = (ROOT / "docs/explanation/detectors.md").read_text("utf-8")
    for detector in DETECTORS:
        assert re.search(rf"^#+ .*\b{detector.name}\b", text, re.MULTILINE | re.IGNORECASE), detector.name


def test_every_preset_is_documented() -> None:
    text = (ROOT / "docs/reference/policy.md").read_text("utf-8")
    for preset in PRESETS:
        assert f"`{preset}`" in text


def test_readme_leads_to_every_command() -> None:
    assert "(docs/reference/commands.md)" in (ROOT / "README.md").read_text("utf-8")
    overview, _, _ = (ROOT / "docs/reference/commands.md").read_text("utf-8").partition("\n## ")
    for name in NAMES:
        assert re.search(rf"^\| \[`drover {name}`\]\(#drover-{name}\) \| \w.+ \|$", overview, re.MULTILINE), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_make_targets_named_in_docs_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in targets, f"{page.name}: make {target}"
    for name in re.findall(r"`((?:docs|tests|benchmarks|proto|agent|collector|dashboard|cli|ansible)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def _prose(page: Path) -> str:
    """Return a page's text without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as MkDocs and GitHub make them, and those that HTML in the page names."""
    text = _prose(page)
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """`make docs` checks the same, with the tools that build the site."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", _prose(page)):
        led = (page.parent / target).resolve() if target else page
        assert led.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in _anchors(led), f"{page.name}: {target}#{anchor}"


def test_every_page_is_in_the_sites_menu() -> None:
    """`make docs` fails on a page that mkdocs.yml leaves out."""
    listed = re.findall(r"^ +- (?:\w+: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md"))


WRITTEN = {f"docs/reference/{name}" for name in REFERENCE} | {  # by scripts
    f"docs/evidence/{name}.md" for name in ("chaos", "console", "detection")
}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_lines_are_wrapped(page: Path) -> None:
    """At 100 characters, but for tables, code, headings and pictures."""
    if str(page.relative_to(ROOT)) in WRITTEN:
        return
    text = _prose(page)
    long = [line for line in text.splitlines() if len(line) > 100 and not line.startswith(("|", "    ", "#", "!["))]
    assert not long, long[0]
