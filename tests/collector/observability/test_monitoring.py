"""The alert rules, their run book and the dashboard, against the page that they are about."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from drover_collector.store import Store
from drover_core.model.events import IncidentKind
from drover_core.model.runbooks import runbook_path
from testbed.monitoring import NAME, facts_of, names_of, whole_page

DOCS = Path(__file__).resolve().parents[3] / "docs"
RULES = DOCS / "monitoring" / "drover.rules.yml"
RULES_TEST = DOCS / "monitoring" / "drover.rules.test.yml"
PAGES = DOCS / "runbooks"
DASHBOARD = DOCS / "monitoring" / "drover-grafana.json"
RUN_BOOK = (DOCS / "reference/prometheus.md").read_text("utf-8")
ALERT = re.compile(r"- alert: (\w+)\n +expr: '((?:[^']|'')+)'\n(.*?)(?=\n      - alert|\n  - name|\Z)", re.DOTALL)
ALERTS = {name: (expr, rest) for name, expr, rest in ALERT.findall(RULES.read_text("utf-8"))}
BOARD = json.loads(DASHBOARD.read_text("utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


@pytest.fixture
def page(store: Store, tmp_path: Path) -> str:
    return whole_page(facts_of(store), tmp_path)


def promtool(*args: str | Path) -> None:
    checked = subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_series_of_rules_dashboard_and_document_is_on_the_page(page: str) -> None:
    names = names_of(page)
    wanted = {name for expr, _ in ALERTS.values() for name in NAME.findall(expr)}
    wanted |= {name for panel in PANELS for target in panel["targets"] for name in NAME.findall(target["expr"])}
    assert wanted - names == set()
    written = documented()
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    assert written == families


def test_every_label_of_rules_and_dashboard_is_on_the_page(page: str) -> None:
    """Of a label that is not there a selector finds nothing, and an alert never burns."""
    labels: dict[str, set[str]] = {}
    for name, written in re.findall(r"^(\w+)(?:\{(.*)\})? ", page, re.MULTILINE):
        labels.setdefault(name, {"job", "instance"}).update(re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', written))
    exprs = [expr for expr, _ in ALERTS.values()]
    exprs += [target["expr"] for panel in PANELS for target in panel["targets"]]
    for expr in exprs:
        for name, selector in re.findall(r"\b((?:drover|process)_\w+)\{([^}]*)\}", expr):
            assert set(re.findall(r'(\w+)\s*[=!]~?=?\s*"', selector)) <= labels[name], expr
        known = set().union(*(labels[name] for name in NAME.findall(expr)))
        for grouped in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expr):
            assert set(re.findall(r"\w+", grouped)) <= known or not NAME.findall(expr), expr
    for panel in PANELS:
        for target in panel["targets"]:
            known = set().union(*(labels[name] for name in NAME.findall(target["expr"])))
            assert set(re.findall(r"\{\{\s*(\w+)", target.get("legendFormat", ""))) <= known, panel["title"]


def documented() -> set[str]:
    """Series of the run book's table: `a_{b,c}_total{label}` are two."""
    found = set()
    for text in re.findall(r"`([a-z_{},]+)`", RUN_BOOK.partition("| Subject |")[2].partition("\n\n")[0]):
        text = re.sub(r"(?<!_)\{[a-z]+\}$", "", text)
        parts = [part.strip("{}").split(",") for part in re.findall(r"\{[^}]+\}|[^{}]+", text)]
        found |= {"".join(each) for each in itertools.product(*parts)}
    return found


def test_every_alert_has_its_page_and_says_what_it_needs() -> None:
    assert len(ALERTS) == RULES.read_text("utf-8").count("- alert:") > 30
    assert {path.stem for path in PAGES.glob("Drover*.md")} == set(ALERTS)
    for name, (_, rest) in ALERTS.items():
        assert f"runbook_url: docs/runbooks/{name}.md\n" in rest + "\n", name
        severity = re.search(r"severity: (info|warning|critical)\n", rest)
        assert severity, name
        waits = re.search(r"for: (\w+)\n", rest)
        written = f"{severity[1].capitalize()}{f', after {waits[1]}' if waits else ''}"
        page = parts_of(PAGES / f"{name}.md")
        assert page[""] == f"# {name}\n\n{written}.", name
        assert f"| [{name}](../runbooks/{name}.md) | {written} |\n" in RUN_BOOK, name
        assert "summary: '" in rest, name
        assert "description: '" in rest, name


def parts_of(path: Path) -> dict[str, str]:
    """A page's parts by their headings; each says something; "" is its head."""
    head, *parts = re.split(r"^## ", path.read_text("utf-8"), flags=re.MULTILINE)
    found = {name: text.strip() for name, _, text in (part.partition("\n") for part in parts)}
    assert list(found) == ["What it means", "First look", "Action"], path.name
    assert all(len(text) > 20 for text in found.values()), path.name
    return {"": head.strip(), **found}


@pytest.mark.parametrize("kind", IncidentKind)
def test_every_kind_of_incident_has_its_page(kind: IncidentKind) -> None:
    assert parts_of(PAGES / f"{kind}.md")[""] == f"# Incident: {kind}"
    assert f"| [{kind}]({kind}.md) |" in (PAGES / "README.md").read_text("utf-8")
    assert runbook_path(kind) == f"docs/runbooks/{kind}.md"


def test_there_are_no_other_pages() -> None:
    assert {p.stem for p in PAGES.iterdir()} == set(ALERTS) | {str(kind) for kind in IncidentKind} | {"README"}


def test_every_alert_is_seen_burning_in_the_tests_of_the_rules() -> None:
    text = RULES_TEST.read_text("utf-8")
    assert [name for name in ALERTS if f'"{name}"' not in text and f": {name}\n" not in text] == []


@pytest.mark.system
def test_promtool_takes_the_rules_and_they_burn_when_they_should() -> None:
    promtool("check", "rules", RULES)
    promtool("test", "rules", RULES_TEST)


def test_the_dashboard_is_whole() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in BOARD["panels"]]
    assert len(titles) == len(set(titles))
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Fleet", "Ingest", "Store", "Detection", "Notifications", "Process"]
    assert {v["name"] for v in BOARD["templating"]["list"]} == {"datasource", "job", "instance"}
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all('job="$job"' in target["expr"] for target in panel["targets"]), panel["title"]


@pytest.mark.system
def test_promtool_takes_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    lines = ["groups:", "  - name: dashboard", "    rules:"]
    for panel in PANELS:
        for target in panel["targets"]:
            expr = target["expr"].replace("$__rate_interval", "1m").replace("$job", "j").replace("$instance", ".*")
            lines += [f"      - record: panel:{panel['id']}:{target['refId']}", f"        expr: {json.dumps(expr)}"]
    (tmp_path / "dashboard.yml").write_text("\n".join(lines) + "\n")
    promtool("check", "rules", tmp_path / "dashboard.yml")
