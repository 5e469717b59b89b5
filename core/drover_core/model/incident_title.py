"""The title of an incident: at most ten words, made of its kind, cause and place. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from drover_core.model.events import Incident, IncidentKind
from drover_core.model.reports import job_label

MOST_WORDS = 10
ELLIPSIS = "…"
# What a cause's own word does not say. Others are the word: `row_remap_failed` is "row remap failed".
WORDS: Mapping[tuple[IncidentKind, str], str] = {
    (IncidentKind.STRAGGLER, "clock"): "slow GPU: low clock",
    (IncidentKind.STRAGGLER, "power_cap"): "slow GPU: power cap",
    (IncidentKind.STRAGGLER, "thermal"): "slow GPU: too hot",
    (IncidentKind.STRAGGLER, "hbm"): "slow GPU: slow memory",
    (IncidentKind.STRAGGLER, "pcie"): "slow GPU: slow PCIe",
    (IncidentKind.STRAGGLER, "nvlink"): "slow GPU: slow NVLink",
    (IncidentKind.STRAGGLER, "host"): "slow GPUs: slow host",
    (IncidentKind.STRAGGLER, "disk"): "slow GPUs: slow disk",
    (IncidentKind.STRAGGLER, "nic"): "slow GPUs: slow network port",
    (IncidentKind.STRAGGLER, "unexplained"): "slow GPU, cause not known",
    (IncidentKind.THERMAL, "inlet"): "hot inlet air",
    (IncidentKind.THERMAL, "cooling"): "poor cooling",
    (IncidentKind.THERMAL, "fan"): "failing fan",
    (IncidentKind.THERMAL, "hbm"): "hot GPU memory",
    (IncidentKind.LIVENESS, "silent"): "no reports",
    (IncidentKind.LIVENESS, "late"): "late reports",
    (IncidentKind.LIVENESS, "never_came"): "never reported",
    (IncidentKind.LIVENESS, "no_telemetry"): "no telemetry",
    (IncidentKind.LIVENESS, "pages_silent"): "exporter pages silent",
    (IncidentKind.LIVENESS, "pages_silent_common"): "exporter pages of many nodes silent",
    (IncidentKind.LIVENESS, "gpu_page_silent"): "GPU page not read",
    (IncidentKind.LIVENESS, "gpu_page_silent_common"): "GPU pages of many nodes silent",
    (IncidentKind.LIVENESS, "gpu_lost"): "GPU lost",
    (IncidentKind.LIVENESS, "gpu_missing"): "GPU missing",
    (IncidentKind.LIVENESS, "gpu_partial"): "GPU reports only partly",
    (IncidentKind.LIVENESS, "maintenance"): "silent in planned work",
    (IncidentKind.LINK, "switch"): "leaf switch trouble",
    (IncidentKind.LINK, "nvlink"): "NVLink trouble",
    (IncidentKind.LINK, "nvlink_down"): "NVLink down",
    (IncidentKind.LINK, "nvlink_errors"): "NVLink errors",
    (IncidentKind.LINK, "pcie"): "PCIe trouble",
    (IncidentKind.LINK, "pcie_narrow"): "PCIe link too narrow",
    (IncidentKind.HANG, "standstill"): "job stands still",
    (IncidentKind.XID, "job_crash"): "job crashed",
    (IncidentKind.SDC, "wrong_results"): "wrong results of computing",
    (IncidentKind.RISK, "likely_to_fail"): "likely to fail soon",
    (IncidentKind.RISK, "root_full"): "root disk nearly full",
    (IncidentKind.RISK, "memory_low"): "host memory nearly full",
    (IncidentKind.IDLE, "idle_gpus"): "GPUs held and idle",
    (IncidentKind.IDLE, "process_left"): "process left on free GPU",
    (IncidentKind.IDLE, "scattered"): "job scattered over leaves",
    (IncidentKind.MEMORY, "host_memory"): "host memory errors",
}
_ACRONYMS = re.compile(r"\b(xid|sxid|ecc|hbm|pcie|gpu|gpus|nic|sdc|cpu|xgmi|fec|ber)\b")
_NAMES = {"pcie": "PCIe", "gpus": "GPUs", "xgmi": "xGMI", "sxid": "SXid"}


def incident_title(incident: Incident, racks: Mapping[str, str] | None = None) -> str:
    """Return the title: `XID 79 on r03n06 GPU 0`.

    Args:
        racks: of nodes, for an incident of a whole rack.
    """
    words = WORDS.get((incident.kind, incident.cause)) or _plain(incident.cause) or str(incident.kind)
    where = _place(incident, racks or {})
    title = f"{words[:1].upper()}{words[1:]} {where}".split()
    return " ".join(title if len(title) <= MOST_WORDS else [*title[: MOST_WORDS - 1], ELLIPSIS])


def _plain(cause: str) -> str:
    return _ACRONYMS.sub(lambda found: _NAMES.get(found[0], found[0].upper()), cause.replace("_", " "))


def _place(incident: Incident, racks: Mapping[str, str]) -> str:
    if incident.scope == "job" and incident.job:
        return f"in {job_label(incident.job)}"
    if incident.node is not None:
        return f"on {incident.node}" + ("" if incident.gpu is None else f" GPU {incident.gpu}")
    nodes = list(dict.fromkeys(node for node, _ in incident.members))
    rack = {racks.get(node, "") for node in nodes}
    if incident.scope == "rack" and len(rack) == 1 and (name := rack.pop()):
        return f"in rack {name}"
    if len(nodes) == 1:
        return f"on {nodes[0]}"
    return f"on {len(nodes)} nodes" if nodes else f"in the {incident.scope}"
