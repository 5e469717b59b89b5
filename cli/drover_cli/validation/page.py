"""The report of a validation, to be signed: one page in Markdown or HTML, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drover_cli.errors import CliError
from drover_cli.output import duration, plain, when
from drover_cli.report.page import NONE, Page, Table
from drover_cli.validation.judge import Reference
from drover_cli.validation.model import Answer, Judgement, Mark, Member, Row

SCHEMA = 1
MOST_ROWS = 400  # of a table on the page; JSON has all
WORDS = {Mark.PASSED: "PASS", Mark.FAILED: "FAIL", Mark.UNKNOWN: "UNKNOWN"}
LEGEND = (
    "Each figure is held against the reference next to it. PASS is proved; UNKNOWN was not measured or has nothing"
    " to be judged by, and is no pass. This report changes nothing on the nodes: no drain, no return to service."
)


@dataclass(frozen=True, slots=True)
class Validation:
    """Everything that the report says. `by`: as the certificates name who asked; `versions`: program -> version."""

    began_ms: int
    ended_ms: int
    fleet: str
    by: str
    why: str
    level: str
    stages: Sequence[str]
    versions: Mapping[str, str]
    members: Sequence[Member]
    answers: Sequence[Answer]
    judged: Judgement


def page(v: Validation) -> Page:
    orders = [answer.order for answer in v.answers]
    protected = sorted({f"{o.protection} {o.job}".strip() for o in orders if o.protection})
    facts = [
        f"Result: {WORDS[v.judged.mark]}",
        f"Nodes: {', '.join(member.name for member in v.members)}",
        f"Fleet: {v.fleet or NONE}",
        f"Asked for by: {v.by or NONE}" + (f" ({v.why})" if v.why else ""),
        f"Began {when(v.began_ms)}, ended {when(v.ended_ms)} ({duration((v.ended_ms - v.began_ms) / 1000)})",
        f"Stages: {', '.join(v.stages)}; level {v.level}",
        f"Versions: {', '.join(f'{name} {version}' for name, version in v.versions.items())}",
        f"Kept from jobs by: {', '.join(protected) or 'not known'}",
    ]
    tables = [_findings(v), _nodes(v), *_figures(v), _orders(v), _signatures()]
    return Page(
        f"Validation of {len(v.members)} nodes", [plain(f) for f in facts], tables, v.judged.doubts or ["Nothing."]
    )


def _findings(v: Validation) -> Table:
    rows = [[WORDS[f.mark], plain(f.about), f.stage, plain(f.text)] for f in v.judged.findings]
    return Table(
        "What was found", ["Mark", "About", "Stage", "What"], rows or [["-", "-", "-", "nothing out of order"]], words=4
    )  # fmt: skip


def _nodes(v: Validation) -> Table:
    rows = []
    for m in v.members:
        known = "; ".join(f"{key} {value}" for key, value in m.facts.items())
        rows.append([m.name, m.pool or NONE, m.leaf or NONE, m.health, m.agent or NONE, plain(known) or NONE])
    return Table("Nodes", ["Node", "Pool", "Leaf", "Health before", "Agent", "Hardware and software"], rows, words=6)


def _figures(v: Validation) -> list[Table]:
    found = []
    for stage in dict.fromkeys(row.stage for row in v.judged.rows):
        rows = [row for row in v.judged.rows if row.stage == stage]
        rows.sort(key=lambda row: row.mark is Mark.PASSED)  # stable: what is no pass comes first
        note = f"{len(rows) - MOST_ROWS} more figures are in the JSON form." if len(rows) > MOST_ROWS else ""
        heads = ["Mark", "Node", "On", "Figure", "Device", "Held against", "Why", "Value", "Unit"]
        cells = [_cells(row) for row in rows[:MOST_ROWS]]
        found.append(Table(f"Figures: {stage}", heads, cells, words=7, note=note))
    return found


def _cells(row: Row) -> list[str]:
    value = f"{row.value:.4g}" if row.value is not None else "absent"
    return [
        WORDS[row.mark], row.node, row.on or NONE, row.figure, row.device or NONE, plain(row.reference) or NONE,
        plain(row.why) or NONE, value, row.unit,
    ]  # fmt: skip


def _orders(v: Validation) -> Table:
    rows = [
        [a.order.id, a.stage, a.order.node, ", ".join(a.order.probes) or "all of the level", a.order.state,
         plain(a.order.detail) or NONE]
        for a in v.answers
    ]  # fmt: skip
    return Table("What ran", ["Order", "Stage", "Node", "Probes", "State", "Detail"], rows, words=6)


def _signatures() -> Table:
    return Table("Signed", ["Name", "Role", "Date", "Signature"], [["", "", "", ""]] * 2, words=4)


def as_json(v: Validation) -> dict[str, Any]:
    return {
        "schema": SCHEMA, "result": v.judged.mark.value, "began_ms": v.began_ms, "ended_ms": v.ended_ms,
        "fleet": v.fleet, "by": v.by, "why": v.why, "level": v.level, "stages": list(v.stages),
        "versions": dict(v.versions), "nodes": [asdict(m) for m in v.members],
        "findings": [asdict(f) for f in v.judged.findings], "figures": [asdict(r) for r in v.judged.rows],
        "not_known": list(v.judged.doubts),
        "orders": [
            {"id": a.order.id, "stage": a.stage, "node": a.order.node, "probes": list(a.order.probes),
             "state": a.order.state, "detail": a.order.detail, "protection": a.order.protection, "job": a.order.job,
             "late": a.late}
            for a in v.answers
        ],
    }  # fmt: skip


def reference_of(text: str, name: str, nodes: int, level: str) -> Reference:
    """Return the figures of an earlier report's JSON form, to hold a new one against.

    Raises:
        CliError: it is no such report, or of other than `nodes` nodes or another level, with which nothing compares.
    """
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise CliError(f"{name}: its form is {data['schema']!r}, and this version reads {SCHEMA}")
        if data["result"] == Mark.FAILED.value:
            raise CliError(f"{name}: its result is {data['result']}; what failed proves nothing of others")
        if (len(data["nodes"]), data["level"]) != (nodes, level):
            raise CliError(
                f"{name}: is of {len(data['nodes'])} nodes at level {data['level']};"
                f" only one of {nodes} at {level} compares"
            )
        return {
            (row["figure"], "" if row["node"] == "all" else row["node"], row["device"]): float(row["value"])
            for row in data["figures"] if row["value"] is not None
        }  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise CliError(f"{name}: is no report of `drover validate` as JSON: {error}") from None
