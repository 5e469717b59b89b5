"""The forms of a report: Markdown, HTML, CSV, JSON."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from drover_cli.report.page import LEGEND, Page, Table, make_page
from drover_proto import fleet_pb2 as pb

STYLE = (
    "body{font:14px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c1c1c}"
    "h1{font-size:1.5rem}h2{font-size:1.05rem;margin:1.4rem 0 .3rem}table{border-collapse:collapse;width:100%}"
    "th,td{padding:.2rem .5rem;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}"
    "th.n,td.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}"
    "@media print{body{margin:0;font-size:11px}}"
)
# A spreadsheet runs a cell that begins so as a formula; names come from nodes and schedulers.
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def markdown(ledger: pb.Ledger) -> str:
    return page_markdown(make_page(ledger), LEGEND)


def page_markdown(page: Page, legend: str) -> str:
    lines = [f"# {_marked(page.title)}", "", *(f"- {_marked(fact)}" for fact in page.facts), ""]
    for table in page.tables:
        lines += [f"## {table.title}", "", *_marked_table(table), ""]
        lines += [_marked(table.note), ""] if table.note else []
    lines += ["## What is not known", "", *(f"- {_marked(doubt)}" for doubt in page.doubts), "", legend]
    return "\n".join(lines) + "\n"


def _marked_table(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(_marked(cell) for cell in table.headers)} |"
    yield f"|{'|'.join(' --- ' if at < table.words else ' ---: ' for at in range(len(table.headers)))}|"
    for row in table.rows:
        yield f"| {' | '.join(_marked(cell) for cell in row)} |"


def _marked(text: str) -> str:
    """Return a text in which no sign is Markdown's or HTML's."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)


def html_page(ledger: pb.Ledger) -> str:
    return page_html(make_page(ledger), LEGEND)


def page_html(page: Page, legend: str) -> str:
    """Return one file without scripts and without anything to load."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{html.escape(page.title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(page.title)}</h1><ul>",
        *(f"<li>{html.escape(fact)}</li>" for fact in page.facts),
        "</ul>",
    ]
    for table in page.tables:
        parts.append(f"<h2>{html.escape(table.title)}</h2><table><thead>{_line(table, table.headers, 'th')}</thead>")
        parts += ["<tbody>", *(_line(table, row, "td") for row in table.rows), "</tbody></table>"]
        parts += [f"<p>{html.escape(table.note)}</p>"] if table.note else []
    parts += ["<h2>What is not known</h2><ul>", *(f"<li>{html.escape(doubt)}</li>" for doubt in page.doubts)]
    return "\n".join([*parts, f"</ul><p>{html.escape(legend)}</p></body></html>"]) + "\n"


def _line(table: Table, cells: Sequence[str], tag: str) -> str:
    kinds = ["" if at < table.words else ' class="n"' for at in range(len(cells))]
    made = (f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{''.join(made)}</tr>"


def csv_rows(ledger: pb.Ledger) -> str:
    """Return every row of the ledger as a line, with exact milliseconds. A column that a row does not have is empty."""
    tables: list[tuple[str, Sequence[Message]]] = [
        ("total", [ledger.total]), ("pool", ledger.pools), ("team", ledger.teams), ("day", ledger.days),
        ("job", ledger.jobs),
        ("other jobs", [ledger.other_jobs] if ledger.HasField("other_jobs") else []), ("node", ledger.nodes),
        ("cause", ledger.causes), ("incident", ledger.incidents), ("availability", ledger.availability),
        ("availability of a node", ledger.worst_nodes), ("repair", ledger.repair),
        ("move", ledger.moves),
    ]  # fmt: skip
    rows = [{"table": name, **flat(message_values(row))} for name, messages in tables for row in messages]
    headers = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, headers, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _safe(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested values as columns: `energy_mj`; those of `shares` have their own names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, before if key == "shares" else f"{before}{key}_")
        else:
            found[before + key] = value
    return found


def json_text(ledger: pb.Ledger) -> str:
    return json.dumps(message_values(ledger), allow_nan=False) + "\n"


def message_values(message: Message) -> dict[str, Any]:
    """Return all fields of a message, with numbers as numbers; None: not known."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            nested = field.type == FieldDescriptor.TYPE_MESSAGE
            found[field.name] = [message_values(each) if nested else each for each in value]
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = message_values(value) if field.type == FieldDescriptor.TYPE_MESSAGE else value
    return found
