"""What all pages share: the viewer's clock, notices about trouble, and links between pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from drover_core.model.collector_roles import why_unjudged
from drover_core.model.events import Severity
from drover_dashboard import client
from drover_dashboard.client import Trouble
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.table import Cell, Mark

PAGES = Path(__file__).parents[1] / "pages"
ALERT_S = 1  # what is open is asked for this often: a fatal kernel line must be on the screen within 2 s
FLEET, INCIDENTS, NODE = PAGES / "fleet.py", PAGES / "incidents.py", PAGES / "node.py"
POLICY = PAGES / "policy.py"
SILENCES, AUDIT = PAGES / "silences.py", PAGES / "audit.py"
PROBES = PAGES / "probes.py"
RISK, CAPACITY, SYSTEM = PAGES / "risk.py", PAGES / "capacity.py", PAGES / "system.py"
JOB, FABRIC, THERMALS = PAGES / "job.py", PAGES / "fabric.py", PAGES / "thermals.py"
OF_THE_PAST = (FLEET, INCIDENTS, NODE, JOB, FABRIC, THERMALS)  # can show a moment of the past (`moment`)
ALL_PAGES = (FLEET, INCIDENTS, NODE, JOB, FABRIC, THERMALS, PROBES, RISK, CAPACITY, POLICY, SILENCES, AUDIT, SYSTEM)


@dataclass(frozen=True, slots=True)
class Viewer:
    """The moment and time zone in which a page shows its times."""

    where: tzinfo
    now_ms: int

    def clock(self, ts_ms: int) -> str:
        return fmt.clock(ts_ms, self.where, self.now_ms)

    def ago(self, ts_ms: int) -> str:
        return fmt.duration(self.now_ms - ts_ms)

    def since(self, ts_ms: int) -> str:
        """`since 03:12:09 CET (14 min)`."""
        return f"since {self.clock(ts_ms)} {self.zone_name()} ({self.ago(ts_ms)})"

    def localize(self, text: str) -> str:
        """A sentence of the collector: its times as the viewer's clock, words for codes, units as elsewhere here."""
        return fmt.in_words(fmt.local_times(text, self.where, self.now_ms)).replace("degC", "°C").replace("+- ", "± ")

    def zone_name(self) -> str:
        return fmt.zone_name(self.where, self.now_ms)


def viewer() -> Viewer:
    """Its clock stands at the moment that the page shows."""
    return Viewer(fmt.zone(st.context.timezone), client.moment_ms() or time.time_ns() // 1_000_000)


def trouble(key: str, found: Trouble | None, as_of_ms: int, who: Viewer) -> None:
    """Say why a page is old or empty; nothing when all is well. `key` is unique on the page."""
    with place():
        if found is not None:
            _show_trouble(key, found, as_of_ms, who)


def place() -> Any:
    """Around what comes and goes. What stands below it keeps its position, by which the browser knows it: its scroll
    and zoom stay, and it is not rebuilt. Empty it takes no room."""
    return st.container()


def _show_trouble(key: str, found: Trouble, as_of_ms: int, who: Viewer) -> None:
    stale = bool(as_of_ms) and not found.slow
    # What is next to it loses its colours: page.css
    notice(key, "trouble_stale" if stale else "trouble", trouble_text(found, as_of_ms, who))


def trouble_text(found: Trouble, as_of_ms: int, who: Viewer) -> str:
    """What is in the way, since when, and what to do. `as_of_ms`: of the answer that is shown; 0: none is."""
    line = f"{found.what} since {who.clock(found.since_ms)} ({found.reason}): {found.advice}"
    if found.not_found:
        line = f"{fmt.capital(found.reason.partition('; `')[0])}: {found.advice}"  # the rest names a command
    if as_of_ms:
        line += f"{'' if line.endswith(('?', '.')) else '.'} Shown is the last answer, of {who.clock(as_of_ms)}."
    return line


def notice(key: str, kind: str, text: str) -> None:
    """A line of plain text; `kind` (trouble, remark, summary, todo) chooses its look in assets/page.css."""
    st.container(key=f"{kind}_{key}").text(text)


def judged() -> bool:
    """Return whether the collector has judged anything since it began. Until then nothing found does not mean that
    nothing is wrong. A standby never has."""
    status = client.fleet().status().value
    return status is not None and bool(status.newest_tick_ms)


def unjudged() -> str:
    """Return what a list shows instead of "none" where the collector has judged nothing."""
    status = client.fleet().status().value
    return f"What is wrong is not known: {why_unjudged('' if status is None else status.role)}."


def heading(text: str) -> None:
    """The name of a section, for eyes and for a reader of headings; the page's own is in its frame."""
    st.header(fmt.plain(text), anchor=False)


def tiles(key: str, shown: Sequence[tuple[str, str, str]]) -> None:
    """Numbers that matter: (label, value, what it is of); as many in a line as the screen has room for."""
    with st.container(horizontal=True, gap="small", key=f"tiles_{key}"):
        for label, value, context in shown:
            st.metric(label, value, context, delta_color="off", delta_arrow="off", border=True)


def severity_cell(severity: Severity) -> Cell:
    return Cell(severity.upper(), badge=severity.value)


def health_cell(health: str, reason: str = "") -> Cell:
    return Cell(health, badge=health, title=reason)


def href(page: Path, **params: str | int | None) -> str:
    """A link for the browser to one of the pages above."""
    given = {key: value for key, value in params.items() if value is not None}
    if "at" not in given and page in OF_THE_PAST and client.moment_ms():
        given["at"] = st.query_params["at"]
    if "cluster" not in given and (cluster := client.fleet_name()):
        given = {"cluster": cluster, **given}
    return f"{page.stem}?{urlencode(given)}"


def deviation_mark(number: float, median: float, unit: str) -> Mark | None:
    """How far a GPU lies from its peers, where that is worth a look: from 5 %, or 6 °C."""
    if unit == "°C":
        degrees = number - median
        if abs(degrees) < 6:
            return None
        return Mark(f"{degrees:+.0f} °C", "bad" if abs(degrees) >= 12 else "warn")
    share = fmt.deviation(number, median)
    if share is None or abs(share) < 0.05:
        return None
    return Mark(f"{share * 100:+.0f} %", "bad" if abs(share) >= 0.15 else "warn")


_racks: tuple[Any, dict[str, str]] = None, {}  # of the newest layout: pages that refresh each second ask for it


def racks() -> dict[str, str]:
    """Rack of each node."""
    global _racks
    layout = client.fleet().layout().value
    if layout is None:
        return {}
    of, found = _racks
    if of is not layout:
        found = {node.name: rack.name for rack in layout.racks for node in rack.nodes}
        _racks = layout, found
    return found


def place_of(node: str) -> tuple[str, str]:
    """(rack, leaf) of a node; empty where the fleet file does not say, or the layout is not known."""
    layout = client.fleet().layout().value
    racks = layout.racks if layout else ()
    return next(((rack.name, n.leaf) for rack in racks for n in rack.nodes if n.name == node), ("", ""))


def given(message: Any, field: str) -> float | None:
    """A field of an answer that may be absent."""
    return getattr(message, field) if message.HasField(field) else None


def numbers(figures: Sequence[tuple[str, str, str]]) -> None:
    """(label, value, remark) side by side; two in a row on a phone."""
    with st.container(key="numbers"):
        for column, (label, value, remark) in zip(st.columns(len(figures), gap="small"), figures, strict=True):
            column.metric(label, value, remark, delta_color="off", delta_arrow="off", border=True)


def go(clicked: str | None, page: Path = NODE) -> None:
    """To what was clicked, `NODE/GPU/INCIDENT` with empty parts where there is none: the incident before the place."""
    if not clicked:
        return
    node, gpu, incident = (*clicked.split("/"), "", "")[:3]
    if incident:
        st.switch_page(INCIDENTS, query_params={"id": incident})
    st.switch_page(page, query_params={"node": node} | ({"gpu": gpu} if gpu else {}))
