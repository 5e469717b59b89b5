"""All that is known of one GPU, in sections as nvidia-smi has them. A section without a value is not drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping

import streamlit as st

from drover_core.metrics import catalog
from drover_core.metrics.catalog import Kind
from drover_core.model import gpu_processes
from drover_dashboard.server import signin
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.table import Cell, Column, Mark, Row, table
from drover_proto import fleet_pb2 as pb

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Load and memory": (
        "gpu_util_ratio", "memory_util_ratio", "framebuffer_used_bytes", "framebuffer_total_bytes", "compute_processes",
        "sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio", "dram_active_ratio", "fp64_active_ratio",
        "fp32_active_ratio", "fp16_active_ratio",
    ),
    "Clocks, power, heat": (
        "sm_clock_mhz", "memory_clock_mhz", "clock_event_reasons", "power_w", "power_limit_w", "gpu_temp_c",
        "memory_temp_c", "thermal_margin_c",
    ),
    "Links": (
        "pcie_generation", "pcie_width", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "pcie_replays",
        "nvlink_active_links", "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s", "nvlink_crc_errors", "nvlink_replays",
        "nvlink_recoveries", "nvlink_effective_ber", "xgmi_corrected", "xgmi_uncorrected", "fabric_state",
    ),
    "Memory errors": (
        "ecc_sram_corrected", "ecc_sram_uncorrected", "ecc_dram_corrected", "ecc_dram_uncorrected",
        "sram_threshold_exceeded", "remapped_rows_corrected", "remapped_rows_uncorrected", "row_remap_pending",
        "row_remap_failed", "remap_banks_max", "remap_banks_none", "recovery_action", "exporter_unhealthy",
    ),
}  # fmt: skip
RARE = frozenset({"xgmi_corrected", "xgmi_uncorrected", "exporter_unhealthy"})  # of other makers, of exporters
PEERS = "median of its peers"
LINK = re.compile(r"gpu(\d{1,3})\.nvlink\.(\d{1,3})")  # of the inventory
OF_LINKS = (
    "Per link: its state and other end, as of the agent's inventory, which is read every 5 min. Errors and traffic are"
    " collected of all links of a GPU together: they stand above."
)
OLD_MS = 30_000  # as in the table of GPUs


def show(item: pb.GpuDetail, inventory: Mapping[str, str], who: view.Viewer) -> None:
    """Sections side by side, below them which board the GPU is."""
    values = {value.metric: value for value in item.values}
    drawn = {head: rows for head, names in SECTIONS.items() if (rows := section(values, names, who))}
    if drawn:
        for column, (head, rows) in zip(st.columns(len(drawn), gap="small"), drawn.items(), strict=True):
            with column:
                label = f"GPU {item.gpu}: {head.lower()}"
                heads = (
                    Column(label, wrap=True),
                    Column(align="right"),
                    Column("peers", "right", help="median of its peers"),
                )
                table(f"gpu_{head}", heads, rows, empty="")
    with view.place():
        if found := links(item, inventory):
            heads = (Column(f"GPU {item.gpu}: NVLinks"), Column("Links"), Column("Up", "right"))
            table("gpu_links", heads, found, empty="")
            view.notice("gpu_links_of", "remark", OF_LINKS)
    rows = [Row((Cell(name, kind="faint"), Cell(text, kind="mono"))) for name, text in _names(item, inventory) if text]
    table("gpu_names", (Column(f"GPU {item.gpu}: identity"), Column(wrap=True)), rows, empty="")


def links(item: pb.GpuDetail, inventory: Mapping[str, str]) -> list[Row]:
    """Return a row for each other end of the GPU's NVLinks: which links lead there; then those that are not up. Pure.

    The agent's inventory names the other end of each link that is up (`gpu3.nvlink.7`); one that was up has an empty
    entry.
    """
    ends: dict[str, list[int]] = {}
    for key, end in inventory.items():
        if (found := LINK.fullmatch(key)) is not None and int(found[1]) == item.gpu:
            ends.setdefault(end, []).append(int(found[2]))
    down = sorted(ends.pop("", []))
    rows = [
        Row((Cell(end, kind="mono"), Cell(_numbers(numbers)), Cell(str(len(numbers)))))
        for end, numbers in sorted(ends.items())
    ]
    if down:
        rows.append(
            Row((Cell("not up any more", kind="strong"), Cell(_numbers(down), mark=Mark("down", "bad")), Cell("0")))
        )
    return rows


def _numbers(found: list[int]) -> str:
    """`0 to 3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(found):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def show_processes(item: pb.GpuDetail, inventory: Mapping[str, str], who: view.Viewer) -> None:
    """Who holds it; users and names by permission."""
    person = signin.person()
    rows, empty = processes(item, inventory, person is not None and person.may_act, who)
    heads = (Column(f"GPU {item.gpu}: processes"), Column("User"), Column("Name", wrap=True), Column("Since"))
    table("gpu_processes", heads, rows, empty=f"Processes of GPU {item.gpu}: {empty}")


def processes(
    item: pb.GpuDetail, inventory: Mapping[str, str], names: bool, who: view.Viewer
) -> tuple[list[Row], str]:  # fmt: skip
    """Return a row for each process that holds the GPU, and what to say where there is none. Pure.

    Args:
        names: the person may see users and names: an operator.
    """
    found = gpu_processes.unpack(inventory.get(gpu_processes.key(item.gpu), ""))
    if found is None:
        job = f" Its job is {item.job}." if item.job else ""
        return [], f"not known: its agent does not list them, may not see them or is silent.{job}"
    listed, total = found
    if not total:
        return [], "none"
    if not names:
        return [], f"{total}; their users and names are shown to operators"
    rows = [
        Row((
            Cell(str(process.pid), kind="mono"),
            Cell(process.user or f"uid {process.uid}"),
            Cell(process.name, kind="mono"),
            Cell(f"{who.clock(process.since_ms)} ({who.ago(process.since_ms)})" if process.since_ms else "not known"),
        ))
        for process in listed
    ]  # fmt: skip
    if total > len(listed):
        rows.append(Row((Cell(f"and {total - len(listed)} more", kind="faint"), Cell(""), Cell(""), Cell(""))))
    return rows, ""


def section(values: Mapping[str, pb.Value], names: tuple[str, ...], who: view.Viewer) -> list[Row]:
    """A row for each value, then one for each reason why others are absent; nothing where no value is there. Pure."""
    rows: list[Row] = []
    absent: dict[str, list[str]] = {}
    for name in names:
        metric, found = catalog.BY_NAME[name], values.get(name)
        if name in RARE and (found is None or not found.present):
            continue
        if found is None or not found.present:
            absent.setdefault(who.localize(fmt.absent(found.reason if found else "")), []).append(metric.label)
            continue
        old = who.now_ms - found.ts_ms > OLD_MS
        value = Cell(fmt.value(metric, found.value), sub=f"{who.ago(found.ts_ms)} ago" if old else "",
                     kind="absent" if old else "")  # fmt: skip
        compared = found.peers > 0 and metric.kind is Kind.GAUGE
        peers = Cell(fmt.value(metric, found.peers_median) if compared else "", kind="faint",
                     title=f"median of {found.peers} peers" if compared else "")  # fmt: skip
        rows.append(Row((Cell(fmt.capital(metric.label), kind="faint"), value, peers)))
    if not rows:
        return []
    for why, names_of in absent.items():
        rows.append(Row((Cell(fmt.capital(", ".join(names_of)), kind="faint"), Cell(why, kind="absent"), Cell(""))))
    return rows


def _names(item: pb.GpuDetail, inventory: Mapping[str, str]) -> list[tuple[str, str]]:
    """Its model, serial, UUID and place, then what else the inventory says of it; processes are by permission."""
    own, inventory = f"gpu{item.gpu}.", gpu_processes.without(inventory)
    inventory = {key: text for key, text in inventory.items() if not LINK.fullmatch(key)}  # they have a table
    found = [("Model", item.model), ("Serial", item.serial), ("UUID", item.uuid), ("PCI", item.pci)]
    known = {text for _, text in found}
    more = (
        (key.removeprefix(own).replace("_", " "), inventory[key]) for key in sorted(inventory) if key.startswith(own)
    )
    return found + [(fmt.capital(name), text) for name, text in more if text not in known]
