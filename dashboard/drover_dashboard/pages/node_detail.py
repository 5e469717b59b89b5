"""The parts of the Node page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import streamlit as st

from drover_core.metrics import catalog
from drover_core.metrics.catalog import Scope
from drover_core.model import gpu_processes
from drover_core.model.conditions import Standing
from drover_core.model.events import Event, from_json
from drover_core.model.scraped import blind_of, origin_of
from drover_dashboard import client
from drover_dashboard.pages import incident_rows, node_gpu
from drover_dashboard.pages.fabric_parts import bytes_per_s
from drover_dashboard.pages.incident_detail import event_rows
from drover_dashboard.widgets import (
    address,
    theme,
    view,
)
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Mark,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

COMPARED = ("sm_clock_mhz", "power_w", "gpu_temp_c", "thermal_margin_c", "gpu_util_ratio", "tensor_active_ratio")
BELOW = {"sm_clock_mhz": "clock_event_reasons", "power_w": "power_limit_w", "gpu_temp_c": "memory_temp_c"}
IDLE = 0x1  # of the reasons for a clock: the GPU has no work
GB = 1e9
MEMORY = ("ecc_dram_uncorrected", "remapped_rows_uncorrected")
FLAGS = {"row_remap_pending": "remap pending", "row_remap_failed": "REMAP FAILED"}
SHOWN_EVENTS = 100
SILENT_MS = 60_000  # what held its GPUs then is not known to hold them now
LIST_PX, FIT = 320, 12  # a longer list scrolls inside
SHOWN_JOBS = 3  # of a node, as rows that lead to them
OLD_MS = 30_000  # a value older than three ticks of the detectors is not what a GPU does now


@dataclass(frozen=True, slots=True)
class _Values:
    """The newest values of one GPU by metric."""

    by_metric: dict[str, pb.Value]
    busy: bool  # it holds a job: an idle GPU differs from busy ones of its model, and nothing is wrong
    who: view.Viewer

    def absent(self, found: pb.Value | None) -> Cell:
        return Cell(self.who.localize(fmt.absent(found.reason if found else "")), kind="absent")

    def cell(self, name: str) -> Cell:
        """A value with its remark against the peers; absent and old ones hatched, with the reason or their age."""
        metric, found = catalog.BY_NAME[name], self.by_metric.get(name)
        if found is None or not found.present:
            return self.absent(found)
        text = fmt.value(metric, found.value)
        if self.who.now_ms - found.ts_ms > OLD_MS:
            return Cell(text, sub=f"{self.who.ago(found.ts_ms)} ago", kind="absent")
        if not self.busy or not found.peers:
            return Cell(text, title="no peers to compare with" if self.busy else "no job: not compared")
        median = fmt.value(metric, found.peers_median)
        own = found.own if found.HasField("own") else found.value  # at the same time: load swings within seconds
        mark = view.deviation_mark(own, found.peers_median, fmt.unit(metric))
        return Cell(text, mark=mark, title=f"median of {found.peers} peers: {median}")

    def with_below(self, name: str) -> Cell:
        """A value of `COMPARED`, and below it what belongs to it: what holds the clock, the power limit, HBM's heat."""
        cell = self.cell(name)
        below = self.below(name)
        return replace(cell, sub=" · ".join(part for part in (cell.sub, below) if part)) if below else cell

    def below(self, name: str) -> str:
        found = self.by_metric.get(BELOW.get(name, ""))
        if found is None or not found.present or self.who.now_ms - found.ts_ms > OLD_MS:
            return ""
        text = fmt.value(catalog.BY_NAME[found.metric], found.value)
        if found.metric == "clock_event_reasons":
            return f"held by {text}" if int(found.value) & ~IDLE else ""
        return f"{'HBM' if found.metric == 'memory_temp_c' else 'limit'} {text}"

    def device_memory(self) -> Cell:
        """Used of what there is, and by how many processes."""
        used, total = self.by_metric.get("framebuffer_used_bytes"), self.by_metric.get("framebuffer_total_bytes")
        if used is None or not used.present:
            return self.absent(used)
        text = f"{used.value / GB:,.1f} GB"
        if self.who.now_ms - used.ts_ms > OLD_MS:
            return Cell(text, sub=f"{self.who.ago(used.ts_ms)} ago", kind="absent")
        most = f"of {total.value / GB:,.1f} GB" if total and total.present else ""
        processes = self.by_metric.get("compute_processes")
        several = f"{processes.value:.0f} processes" if processes and processes.present and processes.value != 1 else ""
        several = "1 process" if processes and processes.present and processes.value == 1 else several
        return Cell(text, sub=" · ".join(part for part in (most, several) if part))

    def nvlink(self) -> Cell:
        """Links that are up, fewer than its peers have marked, and what is sent over them."""
        up = self.by_metric.get("nvlink_active_links")
        if up is None or not up.present:
            return self.absent(up)
        fewer = up.peers and up.value < up.peers_median
        mark = Mark(f"of {up.peers_median:.0f}", "bad") if fewer else None
        return self._link(f"{up.value:.0f} up", mark, "nvlink_tx_bytes_per_s", up)

    def pcie(self) -> Cell:
        """Generation and lanes; fewer lanes than its peers have are marked, and a lower generation under load."""
        generation, width = self.by_metric.get("pcie_generation"), self.by_metric.get("pcie_width")
        if generation is None or width is None or not (generation.present and width.present):
            return self.absent(width if width is None or not width.present else generation)
        usual = f"gen {generation.peers_median:.0f} x{width.peers_median:.0f}"
        less = width.peers and width.value < width.peers_median
        less = less or (self.busy and generation.peers and generation.value < generation.peers_median)
        mark = Mark(f"peers: {usual}", "bad") if less else None
        return self._link(f"gen {generation.value:.0f} x{width.value:.0f}", mark, "pcie_tx_bytes_per_s", width)

    def _link(self, text: str, mark: Mark | None, flow: str, of: pb.Value) -> Cell:
        sent = self.by_metric.get(flow)
        if self.who.now_ms - of.ts_ms > OLD_MS:
            return Cell(text, sub=f"{self.who.ago(of.ts_ms)} ago", kind="absent")
        detail_text = bytes_per_s(sent.value) if sent and sent.present else "absent"
        return Cell(text, sub="" if detail_text == "absent" else detail_text, mark=mark, title=f"sent: {detail_text}")

    def memory(self) -> Cell:
        """Uncorrected errors, remapped rows and the driver's remap flags."""
        found = [self.by_metric.get(name) for name in MEMORY]
        flags = [
            text for name, text in FLAGS.items() if (flag := self.by_metric.get(name)) and flag.present and flag.value
        ]
        if not flags and not any(value and value.present for value in found):
            return self.absent(found[0])
        counts = " / ".join(f"{value.value:.0f}" if value and value.present else "absent" for value in found)
        return Cell(counts, mark=Mark(", ".join(flags), "bad") if flags else None)


def identity(detail: pb.NodeDetail, who: view.Viewer) -> None:
    """Which node it is, its health, its jobs and its open incidents."""
    row = detail.row
    jobs = {fmt.job(job): job for job in row.jobs[:SHOWN_JOBS]}
    lines = [_head(row, who), *(_job(key, job) for key, job in jobs.items())]
    clicked = table("node_head", (Column(), Column(wrap=True), Column()), lines, empty="", link_column=1)
    if clicked in jobs:
        st.switch_page(view.JOB, query_params={"job": jobs[clicked]})
    _incidents(row, who)


def gpus(detail: pb.NodeDetail, gpu: int | None, who: view.Viewer) -> None:
    """The GPUs side by side, then who holds the chosen one."""
    columns = [
        Column("GPU"),
        Column("Health"),
        *(Column(fmt.label(name), "right") for name in COMPARED),
        Column("Memory used", "right", help="device memory in use, of how much, and by how many processes"),
        Column("NVLink", "right", help="links that are up, what is sent over them"),
        Column("PCIe", "right", help="generation and lanes now, what is sent; idle some drop to a lower generation"),
        Column("HBM errors / remapped", "right", help="uncorrected errors since driver load / rows remapped"),
        Column("Job"),
    ]
    rows = [_gpu(item, item.gpu == gpu, who, detail.row.name) for item in detail.gpus]
    chosen = "" if gpu is None else str(gpu)
    clicked = table("gpus", columns, rows, empty=_no_gpu(detail), selected=chosen, link_column=0)
    if clicked:
        address.write(gpu=None if clicked == chosen else clicked)
        st.rerun()
    st.caption(
        "Coloured figures: difference from the median of the GPUs in the same job. Hatched: absent, with the reason."
        " The stroke before a GPU is its line in the charts. Click a GPU for who holds it and all its values."
    )
    with view.place():
        for item in detail.gpus:
            if item.gpu == gpu:
                silent = who.now_ms - detail.row.last_seen_ms > SILENT_MS
                node_gpu.show_processes(item, {} if silent else detail.inventory, who)
    _blind(detail)


def _head(row: pb.NodeRow, who: view.Viewer) -> Row:
    seen_ms = row.last_seen_ms
    seen = (
        f"last report {who.clock(seen_ms)} {who.zone_name()} ({who.ago(seen_ms)} ago)" if seen_ms else "never reported"
    )
    named = (("rack ", row.rack), ("leaf ", row.leaf), ("pool ", row.pool), ("", row.sku))
    place = " · ".join(name + value for name, value in named if value)
    more = f"{len(row.jobs)} jobs" if len(row.jobs) > SHOWN_JOBS else "" if row.jobs else "no job"
    about = " · ".join(part for part in (who.localize(row.reason), row.maintenance, seen, more) if part)
    return Row((view.health_cell(row.health), Cell(row.name, sub=about, kind="strong"), Cell(place, sub=_agent(row))))


def _job(key: str, job: str) -> Row:
    return Row((Cell("job", kind="faint"), Cell(job), Cell("")), id=key, href=view.href(view.JOB, job=job))


def _agent(row: pb.NodeRow) -> str:
    return f"agent {row.agent_version}" if row.agent_version else "agent's version not known"


def _blind(detail: pb.NodeDetail) -> None:
    """Of a node without an agent: which detectors cannot judge it, and why."""
    origin = origin_of(detail.inventory, detail.row.agent_version)
    if origin:
        blind = blind_of(detail.inventory).items()
        rows = [Row((Cell(name, kind="strong"), Cell(text)), id=name) for name, text in blind]
        table("blind", (Column(origin), Column("Blind: cannot be judged here", wrap=True)), rows, empty="")


def _no_gpu(detail: pb.NodeDetail) -> str:
    """An agent without a GPU says why (inventory key `no_gpu_reason`)."""
    why = detail.inventory.get("no_gpu_reason", "")
    return f"No GPU: {why}" if why else "No GPU is known on this node."


def _incidents(row: pb.NodeRow, who: view.Viewer) -> None:
    answer = client.fleet().incidents("open", node=row.name, limit=5)
    lines = []
    if answer.value is not None:
        found, reply = incident_rows.parse(answer.value), answer.value
        lines = incident_rows.rows(found, {}, who, reply.silences, reply.handling)
    with view.place():
        clicked = incident_rows.show("node_incidents", lines, empty="") if lines else None
    if clicked:
        st.switch_page(view.INCIDENTS, query_params={"id": clicked})


def _gpu(item: pb.GpuDetail, selected: bool, who: view.Viewer, node: str = "") -> Row:
    """`node`: whose page a click on the row opens with this GPU chosen."""
    values = _Values({value.metric: value for value in item.values}, bool(item.job), who)
    cells = (
        Cell(
            f"GPU {item.gpu}",
            title=f"{item.model} {item.serial} {item.pci}",
            kind="strong",
            line=theme.line(item.gpu),
        ),
        view.health_cell(item.health, item.reason),
        *(values.with_below(name) for name in COMPARED),
        values.device_memory(),
        values.nvlink(),
        values.pcie(),
        values.memory(),
        Cell(item.job or "none", kind="" if item.job else "faint"),
    )
    opens = view.href(view.NODE, node=node, gpu=item.gpu) if node else ""
    return Row(cells, id=str(item.gpu), href=opens, tone="asked" if selected else "")


def below(detail: pb.NodeDetail, gpu: int | None, who: view.Viewer) -> None:
    """All values of the chosen GPU, the log of the node, its host and its inventory."""
    with view.place():
        for item in detail.gpus:
            if item.gpu == gpu:
                node_gpu.show(item, detail.inventory, who)
    left, right = st.columns([1.4, 1], gap="medium")
    with left:
        events = [from_json(Event, text) for text in detail.events_json[:SHOWN_EVENTS]]
        table(
            "node_events",
            (Column("Events"), Column(), Column(wrap=True)),
            event_rows(events, who),
            empty="No event is known of this node.",
            height=420 if events else None,
        )
    with right:
        _conditions(detail, who)
        _inventory(detail, who)


def _conditions(detail: pb.NodeDetail, who: view.Viewer) -> None:
    """What others write of the node in Kubernetes: all that is not well. Nothing where it is not read."""
    if not detail.conditions_read_ms:
        return
    rows = [_condition(each, who) for each in detail.conditions]
    read = f"read {who.ago(detail.conditions_read_ms)} ago"
    rows.append(Row((Cell(f"well: {fmt.number(detail.conditions_well)}", kind="faint"), Cell(read, kind="faint"))))
    table("conditions", (Column("Kubernetes conditions"), Column(wrap=True)), rows, empty="", height=_height(rows))


def _condition(found: pb.NodeCondition, who: view.Viewer) -> Row:
    why = ": ".join(part for part in (found.reason, found.message) if part)
    since = who.since(found.since_ms) if found.since_ms else ""
    mark = Mark("fault", "warn") if found.standing == Standing.FAULT else None
    judged = "not judged" if found.standing == Standing.SHOWN else ""
    sub = " · ".join(part for part in (since, judged) if part)
    kind = "absent" if found.standing == Standing.UNKNOWN else ""
    return Row((Cell(f"{found.type}={found.status}", mark=mark, kind=kind), Cell(why or "no reason given", sub=sub)))


def _inventory(detail: pb.NodeDetail, who: view.Viewer) -> None:
    values = {value.metric: value for value in detail.values}
    rows = []
    absent: dict[str, list[str]] = {}  # metrics by reason: one row for each reason, not for each metric
    for metric in catalog.of_scope(Scope.NODE):
        found = values.get(metric.name)
        if found is None:
            continue
        if found.present:
            value = Cell(fmt.value(metric, found.value))
            rows.append(Row((Cell(fmt.capital(metric.label), kind="faint"), value)))
        else:
            absent.setdefault(who.localize(fmt.absent(found.reason)), []).append(metric.label)
    rows += [Row((Cell(why, kind="absent"), Cell(", ".join(names), kind="faint"))) for why, names in absent.items()]
    columns = (Column("Host"), Column(wrap=True))
    table("host", columns, rows, empty="Nothing is known of the host.", height=_height(rows))
    columns, rows = (Column("Inventory"), Column(wrap=True)), inventory_rows(detail)
    table("inventory", columns, rows, empty="The agent sent no inventory.", height=_height(rows))


def _height(rows: Sequence[Row]) -> int | None:
    return LIST_PX if len(rows) > FIT else None


def inventory_rows(detail: pb.NodeDetail) -> list[Row]:
    """What differs from the node's peers first, with what most of them have."""
    peers = {found.key: found for found in detail.inventory_peers}
    rows = []
    shown = gpu_processes.without(detail.inventory)  # of the chosen GPU they stand above, by permission
    for key, text in sorted(shown.items(), key=lambda item: (not _differs(peers, *item), item)):
        found, cell = peers.get(key), Cell(text)
        if found and _differs(peers, key, text):
            detail_text = f"{fmt.number(found.having)} of {fmt.number(found.peers)} peers: {found.usual}"
            cell = Cell(text, mark=Mark(detail_text, "warn"))
        elif found:
            cell = Cell(text, title=f"as {fmt.number(found.having)} of {fmt.number(found.peers)} peers")
        rows.append(Row((Cell(key, kind="faint"), cell)))
    return rows


def _differs(peers: Mapping[str, pb.InventoryPeers], key: str, text: str) -> bool:
    return key in peers and peers[key].usual != text.strip()
