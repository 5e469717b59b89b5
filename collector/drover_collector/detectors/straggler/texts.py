"""Write the findings about stragglers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from drover_collector.detectors._lib.metrics import column
from drover_collector.detectors._lib.robust import MAD_TO_SIGMA, Grouping
from drover_collector.detectors._lib.texts import job_named, place
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Floats
from drover_core.metrics.catalog import BY_NAME, describe
from drover_core.model.events import (
    Evidence,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "straggler"

# Metric -> verb of the summary, before the metric's value.
_DOES: Mapping[str, str] = {
    "sm_clock_mhz": "runs its SMs at", "memory_clock_mhz": "runs its HBM at", "dram_active_ratio": "moves HBM data for",
    "pcie_width": "has a PCIe link of", "pcie_generation": "has a PCIe link of generation",
    "nvlink_active_links": "has this many NVLinks up:", "gpu_util_ratio": "has a kernel running for",
    "nvlink_tx_bytes_per_s": "sends over NVLink at", "sm_active_ratio": "has its SMs active for",
}  # fmt: skip
# cause -> (why, what to do, the metrics that show it: the summary has the first one below the peers')
CAUSES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "thermal": (
        "heat throttles it",
        "Test it with a probe. If it is slow there too, drain the node when its work is done, and check its cooling.",
        ("sm_clock_mhz", "gpu_temp_c", "thermal_margin_c", "power_w", "tensor_active_ratio", "sm_active_ratio"),
    ),
    "power_cap": (
        "its power is capped below its peers'",
        "Test it with a probe. If it is slow there too, reset the power limit (nvidia-smi -pl), or check the node's "
        "power supplies if nobody set it.",
        ("sm_clock_mhz", "power_limit_w", "power_w", "tensor_active_ratio", "sm_active_ratio"),
    ),
    "clock": (
        "neither heat nor a power cap explains it",
        "Test it with a probe. If it is slow there too, reset its clock settings (nvidia-smi -rgc -rac), and drain the "
        "node if it stays slow.",
        ("sm_clock_mhz", "power_w", "tensor_active_ratio", "sm_active_ratio"),
    ),
    "hbm": (
        "its HBM is slower than its peers'",
        "Test its memory bandwidth with a probe. Check remapped rows and ECC counters, then drain the node.",
        ("memory_clock_mhz", "dram_active_ratio", "sm_active_ratio", "tensor_active_ratio"),
    ),
    "pcie": (
        "its PCIe link has fewer lanes or a lower generation than its peers'",
        "Test its PCIe link with a probe. Then drain the node, reseat GPU or riser, and reboot to train it again.",
        ("pcie_width", "pcie_generation", "gpu_util_ratio", "pcie_rx_bytes_per_s", "pcie_replays"),
    ),
    "nvlink": (
        "it lost NVLinks that its peers have",
        "Test its NVLinks with a probe, and check for XID 74. Then drain the node, and reset the GPU and the fabric.",
        ("nvlink_active_links", "nvlink_tx_bytes_per_s", "nvlink_crc_errors", "sm_active_ratio"),
    ),
    "host": (
        "its host is late with work for its GPUs",
        "Test the node with a probe. Check its CPUs for a stray process, a wrong governor, or a NUMA or memory fault.",
        ("gpu_util_ratio", "sm_active_ratio", "power_w"),
    ),
    "unexplained": (
        "it is busy for longer with the same work, and no metric says why",
        "Test it with a probe, its memory bandwidth first: slow HBM at its usual clock looks like this. Drain the node "
        "when its work is done if it is slow there too.",
        ("sm_active_ratio", "power_w", "tensor_active_ratio", "dram_active_ratio"),
    ),
}  # fmt: skip


# Channel -> evidence of the usual value in this job.
USUAL: Mapping[str, str] = {
    "clock": "before, its clock was {:.1%} of its peers'", "duty": "before, its duty was {:.1%} of its peers'",
    "dram": "before, its HBM traffic was {:.1%} of its peers'",
    "busy": "before, its busy time for the same work was {:.1%} of its peers'",
    "nvlink": "before, its NVLink traffic was {:.1%} of its peers'",
    "pause": "before, its node's busy time for the same work was {:.1%} of its peers'",
    "late": "before, its node was without a kernel for {:+.1%} of the time against its peers",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slow:
    """A slow GPU.

    Attributes:
        group_size: GPUs that wait for it, itself included.
        usual: name of USUAL -> its usual value, if it was learnt.
        where: its place in the job's parallel groups, in words; "": not known.
        of_stage: its peers are those of its pipeline stage alone.
    """

    cause: str
    since_ms: int
    groups: Grouping
    group_size: int
    waiting: float  # share of each step that the peers wait for it
    usual: Mapping[str, float]
    where: str = ""
    of_stage: bool = False


def finding(window: Window, g: int, slow: Slow, now_ms: int) -> Finding:
    """Return the finding for a GPU that its job waits for."""
    node, gpu = window.index.member(g)
    where = f"{place(node, gpu)} ({slow.where})" if slow.where else place(node, gpu)
    return _finding(window, g, slow, now_ms, "gpu", node, gpu, where)


def node_finding(window: Window, n: int, gpus: list[int], slow: Slow, now_ms: int) -> Finding:
    """Return the finding for a node with several slow GPUs; the first of `gpus` represents all."""
    node = window.index.nodes[n].name
    some = f"{len(gpus)} of its {window.index.nodes[n].gpus} GPUs"
    where = f"{place(node, None)} ({'; '.join(filter(None, (some, slow.where)))})"
    return _finding(window, gpus[0], slow, now_ms, "node", node, None, where[0].upper() + where[1:])


def _finding(
    window: Window, g: int, slow: Slow, now_ms: int, scope: str, node: str, gpu: int | None, where: str
) -> Finding:
    why, advice, metrics = CAUSES[slow.cause]
    if slow.cause == "nvlink" and "nvlink" in slow.usual:
        why = "its NVLinks carry less than before for the same work"
    job = window.job_of(g)
    evidence = evidence_of(window, g, slow, metrics)
    of = f"its pipeline stage of {job_named(str(job))}" if slow.of_stage else job_named(str(job))
    what = "is slower than its peers"
    for item in evidence:
        name = item.metric or ""
        if name == "sm_active_ratio" and slow.cause != "host":  # elsewhere a slow GPU's are active for longer
            continue
        if name in _DOES and item.value is not None and item.expected is not None and item.value < item.expected:
            metric = BY_NAME[name]
            what = (
                f"{_DOES[name]} {describe(metric, item.value)} while {item.peers} peers of {of} "
                f"have {describe(metric, item.expected)}"
            )
            break
    waits = f"; peers wait about {slow.waiting:.0%} of each step" if slow.waiting >= 0.01 else ""
    return Finding(
        NAME,
        IncidentKind.STRAGGLER,
        slow.cause,
        scope,
        node,
        gpu,
        ((node, gpu),),
        now_ms,
        slow.since_ms,
        Severity.WARNING,
        0.9 if slow.waiting >= 0.01 else 0.75,
        RecommendedAction.PROBE,
        f"{where} {what}; {why}{waits}.",
        advice,
        evidence,
        job,
        lost_gpus=None,
        waiting_gpus=slow.waiting * (slow.group_size - 1),
        snapshot={"usual": dict(slow.usual)} if slow.usual else {},
    )


def evidence_of(window: Window, g: int, slow: Slow, metrics: tuple[str, ...]) -> tuple[Evidence, ...]:
    """Return evidence for each metric of the GPU, compared with its peers."""
    result = []
    inside = slow.groups.of(int(slow.groups.groups[g]))  # only its group: there may be hundreds of stragglers
    columns = {name: column(window, name) for name in metrics}
    shown = {name: float(values[g]) for name, values in columns.items() if not np.isnan(values[g])}
    against = _against(np.array([columns[name][inside] for name in shown]))
    for (name, value), (median, sigma, known) in zip(shown.items(), against, strict=True):
        metric, count = BY_NAME[name], known - 1
        text = f"{metric.label}: {describe(metric, value)}; median of {count} peers {describe(metric, median)}"
        result.append(Evidence(text, name, value, median, sigma, count, slow.since_ms, window.newest.end_ms))
    reasons = column(window, "clock_event_reasons")[g]
    if not np.isnan(reasons) and reasons:
        text = f"it reports: {describe(BY_NAME['clock_event_reasons'], float(reasons))}"
        result.append(Evidence(text, "clock_event_reasons", float(reasons), from_ms=slow.since_ms))
    result += [
        Evidence(USUAL[name].format(value), value=value, key=f"usual {name}") for name, value in slow.usual.items()
    ]
    return tuple(result)


def _against(table: Floats) -> list[tuple[float, float, int]]:
    """Return median, spread and number of the known values of each row, which has at least one."""
    if not len(table):
        return []
    ordered, rows = np.sort(table, axis=1), np.arange(len(table))
    counts = table.shape[1] - np.count_nonzero(np.isnan(ordered), axis=1)
    low, high = (counts - 1) // 2, counts // 2
    medians = (ordered[rows, low] + ordered[rows, high]) / 2
    away = np.sort(np.abs(ordered - medians[:, None]), axis=1)
    sigmas = (away[rows, low] + away[rows, high]) / 2 * MAD_TO_SIGMA
    return list(zip(medians.tolist(), sigmas.tolist(), counts.tolist(), strict=True))


def nic_finding(
    window: Window, n: int, link: str, values: tuple[float, float, int], since_ms: int, now_ms: int
) -> Finding:
    """Return the finding for a slow port. `values`: its rate, the peers' median, and their number."""
    node, (rate, usual, count) = window.index.nodes[n].name, values
    first = int(window.index.first_gpu[n])
    job = window.job_of(first) if window.index.nodes[n].gpus else None
    evidence = Evidence(
        f"port {link}: {rate:g} Gb/s; median of {count} ports {usual:g} Gb/s", "rate_gbps", rate, usual, None, count,
        since_ms, window.newest.end_ms, link,
    )  # fmt: skip
    return Finding(
        NAME, IncidentKind.STRAGGLER, "nic", "node", node, None, ((node, None),), now_ms, since_ms, Severity.WARNING,
        0.85, RecommendedAction.PROBE,
        f"Port {link} of node {node} runs at {rate:g} Gb/s while {count} ports of its kind have {usual:g} Gb/s.",
        "Test it with a probe between nodes. Check the cable, its transceivers and the switch port. Its job's "
        "collectives run at the slowest port's pace.",
        (evidence,), job,
    )  # fmt: skip
