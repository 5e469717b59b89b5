"""Grafana's boards of GPUs and incidents: a page or REST gives each name, label and field; each query parses."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from drover_collector.exporters.settings import FleetPageConfig
from drover_collector.rest import openapi
from drover_core.metrics.series import GpuIdentity, series_of

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "monitoring"
GPUS = {"drover": "drover-gpus-grafana.json", "dcgm": "drover-gpus-dcgm-grafana.json"}
BOARDS = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("drover-*-grafana.json"))}
FUNCTIONS = {"count", "topk", "bottomk", "sum", "quantile", "by", "on", "group_right", "increase", "label_values"}
DOCUMENT = openapi.document()
CONSOLE = {"node", "job", "incidents"}  # its pages that boards link to


def board(naming: str) -> dict[str, Any]:
    return dict(BOARDS[GPUS[naming].removesuffix(".json")])


def queries(naming: str) -> list[str]:
    found = [target["expr"] for panel in board(naming)["panels"] for target in panel["targets"]]
    return found + [each["definition"] for each in board(naming)["templating"]["list"] if each["type"] == "query"]


def walk(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [found for each in value for found in walk(each)]
    return [value, *(found for each in value.values() for found in walk(each))] if isinstance(value, dict) else []


@pytest.mark.parametrize("naming", GPUS)
def test_every_name_and_label_is_on_the_page_with_its_usual_metrics(naming: str) -> None:
    names = {series.name for series in series_of(naming, FleetPageConfig().metrics)}
    labels = set(GpuIdentity("n0", 0, "GPU-1", "H100", "r0", "00:01").labels(naming, "train"))
    for query in queries(naming):
        words = set(re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"|\[\w+\]|\de\d', "", query))) - FUNCTIONS
        assert words & names, query
        assert words <= names | labels, query
    legends = [target["legendFormat"] for panel in board(naming)["panels"] for target in panel["targets"]]
    assert {name for legend in legends for name in re.findall(r"\{\{(\w+)", legend)} <= labels
    linked = re.findall(r"__field\.labels\.(\w+)", json.dumps(board(naming)))
    assert set(linked) <= labels and len(linked) > 5


@pytest.mark.system
@pytest.mark.parametrize("naming", GPUS)
def test_prometheus_parses_every_query(naming: str, tmp_path: Path) -> None:
    exprs = [query for query in queries(naming) if not query.startswith("label_values")]
    rules = {"groups": [{"name": "g", "rules": [
        {"record": f"r{n}", "expr": re.sub(r"\$\w+", "x", query)} for n, query in enumerate(exprs)
    ]}]}  # fmt: skip
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps(rules), "utf-8")
    checked = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True)
    assert checked.returncode == 0 and f"{len(exprs)} rules found" in checked.stdout, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", BOARDS)
def test_what_a_board_takes_by_rest_is_there(name: str) -> None:
    targets = [each for each in walk(BOARDS[name]) if each.get("source") == "url"]
    assert len(targets) >= 2
    for target in targets:
        address = urlsplit(target["url"])
        operation = DOCUMENT["paths"][address.path]["get"]
        assert set(parse_qs(address.query)) <= {each["name"] for each in operation["parameters"]}
        schema: Any = operation["responses"]["200"]["content"]["application/json"]["schema"]
        if target["root_selector"]:
            schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            schema = schema["properties"][target["root_selector"]]
        item = DOCUMENT["components"]["schemas"][schema["items"]["$ref"].rpartition("/")[2]]
        assert {column["selector"] for column in target["columns"]} <= item["properties"].keys()


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_whole_and_links_to_pages_of_the_console(name: str) -> None:
    panels = BOARDS[name]["panels"]
    for part in ("id", "title"):
        assert len({panel[part] for panel in panels}) == len(panels)
    assert BOARDS[name]["annotations"]["list"][0]["target"]["format"] == "dataframe"
    pages = set(re.findall(r"\$\{console\}/(\w+)\?", json.dumps(BOARDS[name])))
    assert pages and pages <= CONSOLE
    for page in pages:
        assert (ROOT / f"dashboard/drover_dashboard/pages/{page}.py").is_file()


@pytest.mark.parametrize("naming", GPUS)
def test_a_link_to_a_node_or_job_takes_the_boards_time_along(naming: str) -> None:
    """As `charts.OPEN` has it: FROM-TO, seconds since the epoch (Grafana, "Global variables")."""
    found = [url for each in walk(board(naming)) if (url := str(each.get("url", ""))).startswith("${console}/")]
    assert found and all(url.endswith("&open=${__from:date:seconds}-${__to:date:seconds}") for url in found)


def test_there_are_three_boards() -> None:
    assert set(BOARDS) == {"drover-gpus-grafana", "drover-gpus-dcgm-grafana", "drover-incidents-grafana"}
