"""Which detectors cannot judge a node whose values come from exporters' pages, and why. Pure.

Each row is read off the detector's own code: without these metrics it stays silent about the fault. The sentences
stand in the node's inventory, so the node's page and `drover node` show them, and `drover doctor` counts them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from drover_collector.scrape.tables import table
from drover_core.model.scraped import BLIND, EXPORTERS

XID_EVENTS = "xid"  # stands for events among metrics
NODES_OWN = frozenset({"link_up", "edac_uncorrected", "inlet_temp_c"})  # of the node, which GPUs' pages do not have


@dataclass(frozen=True, slots=True)
class Need:
    """What a detector needs for one kind of fault: all of `metrics`.

    Attributes:
        remedy: with an exporter's page. hw: OpenTelemetry's name for it; "": there is none. nvidia: the fault is
            NVIDIA's own.
    """

    detector: str
    what: str
    metrics: tuple[str, ...]
    remedy: str
    nvidia: bool = False
    hw: str = ""


NEEDS: tuple[Need, ...] = (
    Need("memory", "uncorrected HBM errors", ("ecc_dram_uncorrected",), "collect DCGM_FI_DEV_ECC_DBE_VOL_DEV",
         hw="hw.errors"),
    Need("memory", "storms of corrected HBM errors", ("ecc_dram_corrected",), "collect DCGM_FI_DEV_ECC_SBE_VOL_DEV",
         hw="hw.errors"),
    Need("memory", "uncorrected SRAM errors", ("ecc_sram_uncorrected",), "collect DCGM_FI_DEV_ECC_DBE_VOL_SRM"),
    Need("memory", "pending row remaps", ("row_remap_pending",), "collect DCGM_FI_DEV_ROW_REMAP_PENDING", nvidia=True),
    Need("memory", "failed row remaps", ("row_remap_failed",), "collect DCGM_FI_DEV_ROW_REMAP_FAILURE", nvidia=True),
    Need("thermal", "hot GPUs", ("gpu_temp_c", "power_w"), "collect DCGM_FI_DEV_GPU_TEMP and POWER_USAGE",
         hw="hw.temperature and hw.power"),
    Need("thermal", "hot HBM", ("memory_temp_c",), "collect DCGM_FI_DEV_MEMORY_TEMP", hw="hw.temperature"),
    Need("thermal", "GPUs held down by heat", ("throttle_thermal_sw_us",), "collect DCGM_FI_DEV_THERMAL_VIOLATION",
         nvidia=True),
    Need("thermal", "hot inlets", ("inlet_temp_c",), "no exporter's page says which sensor is the inlet"),
    Need("straggler", "slow GPUs", ("gpu_util_ratio", "power_w", "sm_clock_mhz"), "collect these three fields"),
    Need("straggler", "why a GPU is slow", ("clock_event_reasons",), "collect DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
         nvidia=True),
    Need("hang", "hung jobs by their traffic", ("nvlink_tx_bytes_per_s", "sm_active_ratio"),
         "collect DCGM_FI_PROF_SM_ACTIVE and NVLINK_TX_BYTES"),
    Need("links", "NVLink errors", ("nvlink_crc_errors", "nvlink_replays"),
         "collect DCGM_FI_DEV_NVLINK_*_ERROR_COUNT_TOTAL", nvidia=True),
    Need("links", "NVLinks that are down", ("nvlink_active_links",), "dcgm-exporter has no such field", nvidia=True),
    Need("links", "GPUs outside of the NVSwitch fabric", ("fabric_state",),
         "collect DCGM_FI_DEV_FABRIC_MANAGER_STATUS", nvidia=True),
    Need("links", "narrow PCIe links", ("pcie_width",), "collect DCGM_FI_DEV_PCIE_LINK_WIDTH"),
    Need("links", "PCIe replays", ("pcie_replays",), "collect DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
         hw="hw.errors"),
    Need("links", "network ports", ("link_up",), "scrape node_exporter with its collector infiniband"),
    Need("kernel", "host memory errors", ("edac_uncorrected",), "scrape node_exporter with its collector edac"),
    Need("xid", "XIDs", (XID_EVENTS,), "collect DCGM_FI_DEV_XID_ERRORS", nvidia=True),
)  # fmt: skip
# Whatever is collected. Detector -> why.
ALWAYS: Mapping[str, str] = {
    "kernel": "kernel lines (panics, MCE, NIC resets, file systems): no exporter reads the kernel log",
    "liveness": "whether a silent node is dead: its exporters may be down alone, so no drain is asked for",
    "drift": "differing drivers, firmware and settings: a page has no inventory",
    "slowdown": "slow training steps: no exporter reads training loops",
    "idle": "GPUs that jobs hold and do not use: a page names no job",
    "probes": "active tests: without an agent nothing runs on the node",
}
LAST_XID = "XIDs by the last code at each read: no time, no text, no repeats, none between two reads"


def blindness(seen: Collection[str], vendors: Collection[str], tables: Collection[str] = ()) -> dict[str, str]:
    """Return detector -> what it cannot judge, as sentences.

    Args:
        seen: names of the metrics that a node's pages have given, and XID_EVENTS where a page has XIDs.
        vendors: of its GPUs, as the tables name them.
        tables: names of the tables by which its values came.
    """
    parts: dict[str, list[str]] = {}
    by_hw = "hw" in tables and not {"dcgm", "amd"} & set(tables)
    for need in NEEDS:
        missing = [name for name in need.metrics if name not in seen]
        if not missing:
            continue
        if need.nvidia and "nvidia" not in vendors:
            parts.setdefault(need.detector, []).append(f"{need.what}: NVIDIA's own, quiet on other GPUs")
        else:
            parts.setdefault(need.detector, []).append(
                f"{need.what}: {', '.join(missing)} missing; {_remedy(need, missing, vendors, by_hw)}"
            )
    for detector, why in ALWAYS.items():
        parts.setdefault(detector, []).append(why)
    if XID_EVENTS in seen:
        parts.setdefault("xid", []).append(LAST_XID)
    return {detector: ". ".join(texts) for detector, texts in parts.items()}


def _remedy(need: Need, missing: Sequence[str], vendors: Collection[str], by_hw: bool) -> str:
    if need.metrics[0] in NODES_OWN:
        return need.remedy
    if by_hw:
        return _hw_remedy(need)
    return _amd_remedy(missing) if "amd" in vendors and "nvidia" not in vendors else need.remedy


def _amd_remedy(missing: Sequence[str]) -> str:
    series = [next((r.series for r in table("amd").rows if r.metric and r.metric.name == m), "") for m in missing]
    return f"collect {' and '.join(series)}" if all(series) else "AMD's exporter has no such field"


def _hw_remedy(need: Need) -> str:
    return f"send {need.hw}" if need.hw else "hw.* has no name for it: send dcgm-exporter's page too"


def inventory(titles: Collection[str], blind: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of a node's inventory that say where its values come from, and who is blind."""
    found = {EXPORTERS: ", ".join(sorted(titles))}
    return found | {BLIND + detector: text for detector, text in blind.items()}
