"""Every GPU at a glance, and what is open, worst first."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import streamlit as st

from drover_core.model.collector_roles import why_unjudged
from drover_core.model.events import Health, Severity
from drover_dashboard import client
from drover_dashboard.pages import adoption, incident_rows
from drover_dashboard.server import signin
from drover_dashboard.widgets import address, moment, trends, view
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.components import component
from drover_dashboard.widgets.fleet_picture import Past, canvas, metrics, playback
from drover_dashboard.widgets.grouping import GROUPS, USUAL
from drover_proto import fleet_pb2 as pb

LIST_PX = 615
SHOWN = 50  # open incidents; more is work for the Incidents page
HEALTH = "health"
LARGE = 6  # figures of health and incidents come first, and are larger
NUMBERS_S = 2  # so soon a collector that fell silent is said to be
QUIET_MS = 60_000  # agents send every 5 s, 30 s at most


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of the fleet, and the page that says more. `tone`: how it looks while it, or what its context counts
    (`also`), is not zero."""

    label: str
    value: int | str
    context: str
    tone: str
    page: Path
    params: Mapping[str, str] = field(default_factory=dict)
    also: int = 0

    def drawn(self, small: bool) -> dict[str, Any]:
        """As assets/figures.js takes it."""
        return {
            "label": self.label,
            "value": self.value if isinstance(self.value, str) else fmt.number(self.value),
            "context": self.context,
            "tone": (self.tone or "plain") if self.value or self.also else "calm",
            "small": small,
            "href": view.href(self.page, **self.params),
            "page": self.label,
        }


@st.fragment(run_every=NUMBERS_S)
def numbers() -> None:
    """One line about Drover itself, then the numbers that matter."""
    who = view.viewer()
    status = client.fleet().status().value
    if status is None:
        return
    view.notice("line", "remark", _line(status, who))
    _tiles(status)


def _asks(status: pb.Status) -> None:
    """What somebody has to see to, a decision that waits for a person before all else."""
    if status.pending:
        waits = "waits" if status.pending == 1 else "wait"
        with st.container(key="urgent_pending"):
            person = signin.person()
            whom = "you: approve or reject" if person is not None and person.may_act else "an operator"
            label = f"**{fmt.several(status.pending, 'decision')} {waits} for {whom}**"
            st.page_link(view.POLICY, label=label, icon=":material/how_to_reg:")
    if status.HasField("receivers") and not status.receivers:
        view.notice(
            "unheard", "trouble", "Nobody is notified of incidents: add a receiver in the collector's settings."
        )
    for number, text in enumerate(status.troubles):
        view.notice(f"own_{number}", "trouble", text)
    if status.unknown_nodes:
        names = ", ".join(status.unknown_nodes[:5])
        more = ", ..." if len(status.unknown_nodes) > 5 else ""
        mend = "adopt them, add them there or stop their agents"
        view.notice("strangers", "trouble", f"Reporting, but not in fleet.toml: {names}{more}; {mend}")
        adoption.form(list(status.unknown_nodes))
    if status.newest_sample_ms and (quiet_ms := status.ts_ms - status.newest_sample_ms) > QUIET_MS:
        mend = "are the agents running, and do they reach the collector?"
        view.notice("quiet", "trouble", f"No telemetry for {fmt.duration(quiet_ms)}: {mend}")


def _line(status: pb.Status, who: view.Viewer) -> str:
    parts = [
        status.fleet or "fleet",
        fmt.MODES.get(status.mode, status.mode),
        f"{fmt.number(status.nodes_reporting)} of {fmt.number(status.nodes_expected)} nodes report",
        f"newest sample {who.ago(status.newest_sample_ms)} old" if status.newest_sample_ms else "no sample yet",
        f"last judged {who.clock(status.newest_tick_ms)}" if status.newest_tick_ms else why_unjudged(status.role),
        *([f"{fmt.number(status.batches_rejected)} batches rejected"] if status.batches_rejected else []),
        f"times in {who.zone_name()}",
    ]
    return "  ·  ".join(parts)


def _tiles(status: pb.Status) -> None:
    health, opened = status.gpus_by_health, status.open_incidents_by_severity
    total = sum(opened[severity] for severity in Severity)
    # The worst alone: a tile has no room for more, and the list next to the picture has all.
    by_severity = next((f"{severity}: {opened[severity]}" for severity in reversed(Severity) if opened[severity]), "")
    away = sum(health[h] for h in (Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.REPAIR))
    silent = status.nodes_expected - status.nodes_reporting
    expected = fmt.number(status.gpus_expected)
    waited = f"24 h; waited {fmt.hours(status.gpu_hours_waited)}"
    critical, lost = opened[Severity.CRITICAL], status.gpu_hours_lost
    judged = bool(status.newest_tick_ms)  # until then nothing found does not mean that nothing is wrong
    unjudged = "" if judged else why_unjudged(status.role)
    hurt = _count(unjudged, status.jobs_hurt, "now")
    found = _count(unjudged, total, by_severity or "none")
    figures = (
        Figure("Healthy", health[Health.HEALTHY], f"of {expected} GPUs", "healthy", view.CAPACITY),
        Figure("Suspect", health[Health.SUSPECT], "watched", "suspect", view.INCIDENTS),
        Figure("Confirmed", health[Health.CONFIRMED], "faulty", "bad", view.INCIDENTS, {"severity": "critical"}),
        Figure("Unknown", health[Health.UNKNOWN], f"silent nodes: {fmt.number(silent)}", "unknown", view.SYSTEM,
               also=silent),
        Figure("Out of service", away, "draining to repair", "out", view.POLICY),
        Figure("Open incidents", found[0], found[1], _found_tone(judged, total, critical), view.INCIDENTS),
        Figure("GPU-hours lost", fmt.hours(lost), waited, "suspect" if lost else "", view.CAPACITY),
        Figure("Jobs hurt", hurt[0], hurt[1], "bad" if judged or status.jobs_hurt else "", view.JOB),
        Figure("Fleet MFU", f"{100 * status.mfu_ratio:.0f} %" if status.HasField("mfu_ratio") else "-", _mfu(status),
               "", view.JOB),
        Figure("Held, idle", _idle_share(status), _idle_of(status), "", view.CAPACITY),
    )  # fmt: skip
    shown = component("figures")(
        key="fleet_figures",
        data={"figures": [figure.drawn(small=number >= LARGE) for number, figure in enumerate(figures)]},
        on_open_change=lambda: None,
        height="content",
    )
    if shown.open:
        asked = next(figure for figure in figures if figure.label == shown.open)
        st.switch_page(asked.page, query_params=dict(asked.params))


def _count(unjudged: str, number: int, context: str) -> tuple[int | str, str]:
    """What a figure shows of what detectors find, and its context."""
    return ("not known", unjudged) if unjudged and not number else (number, context)


def _found_tone(judged: bool, total: int, critical: int) -> str:
    if not (judged or total):
        return "unknown"
    return "bad" if critical else "suspect"


def _mfu(status: pb.Status) -> str:
    return f"of {fmt.several(status.mfu_gpus, 'GPU')}" if status.HasField("mfu_ratio") else "none reported"


def _idle_share(status: pb.Status) -> str:
    if not status.HasField("gpus_idle") or not status.gpus_held:
        return "-"
    return f"{100 * status.gpus_idle / status.gpus_held:.0f} %"


def _idle_of(status: pb.Status) -> str:
    if not status.HasField("gpus_idle"):
        return "not known"
    return f"{fmt.number(status.gpus_idle)} of {fmt.number(status.gpus_held)}"


@st.fragment(run_every=view.ALERT_S)
def incidents() -> None:
    """What is wrong with Drover itself, which must not move the picture when it comes or goes; then open incidents,
    worst first."""
    who = view.viewer()
    if not moment.at_ms():
        own = client.fleet().status()
        view.trouble("status", own.trouble, own.as_of_ms, who)
        with view.place():
            if own.value is not None:
                _asks(own.value)
    answer = client.fleet().incidents("open", limit=SHOWN)
    if answer.value is None:
        view.notice("incidents", "remark", "What is open is not known while the collector does not answer.")
        return
    found = incident_rows.parse(answer.value)
    rows = incident_rows.rows(found, view.racks(), who, answer.value.silences, answer.value.handling)
    none = "No open incident." if view.judged() else view.unjudged()
    clicked = incident_rows.show(
        "open_incidents", rows, empty="No open incident then." if moment.at_ms() else none, height=LIST_PX
    )
    if clicked:
        st.switch_page(view.INCIDENTS, query_params={"id": clicked})
    if answer.value.total > len(found):
        st.page_link(view.INCIDENTS, label=f"The worst {len(found)} of {fmt.number(answer.value.total)} open incidents")


PLAYED = re.compile(r"(\d{1,10})-(\d{1,10})")
PLAYED_MOST_MS = 40 * 86_400_000


def past_played() -> Past | None:
    """What the picture shows of the past; None: it is of now."""
    at_ms = moment.at_ms()
    if not at_ms:
        return None
    found = PLAYED.fullmatch(st.query_params.get(moment.PLAY, ""))
    from_ms, to_ms = (int(found[1]) * 1000, int(found[2]) * 1000) if found else (at_ms, at_ms)
    to_ms = min(to_ms, time.time_ns() // 1_000_000 - 1000)
    if not 0 < to_ms - from_ms <= PLAYED_MOST_MS:
        from_ms = to_ms = at_ms
    return Past(from_ms, to_ms, min(max(at_ms, from_ms), to_ms))


def then() -> None:
    """The figures of a moment of the past: those that are kept."""
    at_ms = moment.at_ms()
    answer = playback(client.fleet(), HEALTH, 0, at_ms, 1)
    view.trouble("then", answer.trouble, answer.as_of_ms, view.viewer())
    if answer.value is None:
        return
    health = answer.value.gpus_by_health
    away = sum(health[h] for h in (Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.REPAIR))
    opened = client.fleet().incidents("open", limit=SHOWN).value
    view.numbers(
        [
            ("Healthy", fmt.number(health[Health.HEALTHY]), f"of {fmt.number(answer.value.gpus)} GPUs"),
            ("Suspect", fmt.number(health[Health.SUSPECT]), "then"),
            ("Confirmed", fmt.number(health[Health.CONFIRMED]), "faulty then"),
            ("Unknown", fmt.number(health[Health.UNKNOWN]), "then"),
            ("Out of service", fmt.number(away), "draining to repair"),
            ("Open incidents", fmt.number(opened.total) if opened else "not known", "then"),
            ("Jobs", fmt.number(answer.value.jobs), f"held {fmt.number(answer.value.gpus_held)} GPUs"),
        ]
    )
    with view.place():
        for number, line in enumerate(answer.value.absent):
            view.notice(f"then_{number}", "todo", line)
    if moment.PLAY not in st.query_params:
        low, high = moment.last_hour(at_ms)
        if st.button("Play the hour around it", icon=":material/play_circle:", key="fleet_play"):
            address.write(**{moment.PLAY: f"{low // 1000}-{high // 1000}"})
            st.rerun()


def picture() -> None:
    """The canvas refreshes itself; only a click or another colour runs this again."""
    named = {metric.name: f"{fmt.capital(metric.label)}" for metric in metrics()}
    with st.container(horizontal=True, vertical_alignment="center"):
        chosen = address.select(
            "color", "Colour every GPU by", [HEALTH, *named], HEALTH, key="fleet_color",
            format_func=lambda name: named.get(name, "Health"),
        )  # fmt: skip
        group = address.select(
            "group", "Group them by", list(GROUPS), USUAL, key="fleet_group",
            format_func=lambda by: f"by {GROUPS[by]}", width=130,
        )  # fmt: skip
        moment.pick(key="fleet_moment")
    clicked = canvas(chosen, group, past_played())
    if isinstance(clicked, int):
        moment.go(clicked)
        st.rerun()
    if clicked:
        st.switch_page(view.NODE, query_params={"node": clicked.node, "gpu": str(clicked.gpu)})


address.title("Fleet")
# The picture first: it asks for itself while the rest is still being found out. `above_fleet` keeps the room of what
# stands above it (page.css), so that nothing moves when that comes.
above = st.container(key="above_fleet")
above.empty()  # a container with nothing in it keeps no room
with st.container(key="reversed_fleet"):
    left, right = st.columns([1.35, 1], gap="medium")
with left:
    picture()
with right:
    incidents()
if moment.at_ms():
    with above:
        then()
else:
    with above:
        numbers()
    trends.show()
