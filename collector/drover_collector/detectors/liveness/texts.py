"""Findings about silence: what an operator reads."""

from __future__ import annotations

import numpy as np

from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.texts import duration, listing, place
from drover_collector.detectors._lib.window import Window
from drover_core.model.events import (
    Evidence,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "liveness"


def planned(window: Window, node: str, stopped_ms: int, now_ms: int) -> Finding:
    return Finding(
        NAME, IncidentKind.LIVENESS, "agent_stopped", "node", node, None, ((node, None),), now_ms, stopped_ms,
        Severity.INFO, 0.95, RecommendedAction.NONE, f"Node {node} is not watched: its agent was stopped on purpose.",
        "Start drover-agent there again when the work on the node is done.",
        (Evidence("the agent said that it was asked to stop", from_ms=stopped_ms),), job_of(window, node),
    )  # fmt: skip


def mass_silent(window: Window, silent: Bools, heard: Bools, since_ms: int, now_ms: int) -> Finding:
    names = [window.index.nodes[n].name for n in np.flatnonzero(silent)]
    who = "No node" if not heard.any() else f"Only {int(heard.sum())} of {len(heard)} nodes"
    return Finding(
        NAME, IncidentKind.LIVENESS, "no_telemetry", "rack", None, None, tuple((name, None) for name in names), now_ms,
        since_ms, Severity.CRITICAL, 0.6, RecommendedAction.NONE, f"{who} reports: {len(names)} are silent at once.",
        "Look first at the collector, its certificates and the network between; the nodes may all be well.",
        (Evidence(f"no telemetry from {listing(names)}", from_ms=since_ms),),
    )  # fmt: skip


def group_silent(window: Window, scope: str, name: str, inside: Bools, since_ms: int, now_ms: int) -> Finding:
    names = [window.index.nodes[n].name for n in np.flatnonzero(inside)]
    look = "its power, cooling and top-of-rack switch" if scope == "rack" else "the leaf switch and its uplinks"
    gpus = sum(window.index.nodes[n].gpus for n in np.flatnonzero(inside))
    return Finding(
        NAME, IncidentKind.LIVENESS, "silent", scope, None, None, tuple((node, None) for node in names), now_ms,
        since_ms, Severity.CRITICAL, 0.8, RecommendedAction.ADVISE,
        f"All {len(names)} nodes of {scope} {name} fell silent, while others report.",
        f"Look at {look} before any single node.",
        (Evidence(f"no telemetry from {listing(names)}", from_ms=since_ms),), lost_gpus=float(gpus),
    )  # fmt: skip


def node_silent(
    window: Window, n: int, never: bool, since_ms: int, quiet_ms: int, clock_wrong: bool, long: bool, now_ms: int
) -> Finding:
    node = window.index.nodes[n]
    if never:
        return Finding(
            NAME, IncidentKind.LIVENESS, "never_came", "node", node.name, None, ((node.name, None),), now_ms, since_ms,
            Severity.WARNING, 0.9, RecommendedAction.ADVISE,
            f"Node {node.name} should exist and has not reported since Drover began to watch.",
            "Check that the node is up and drover-agent runs there, or take it out of fleet.toml.",
            (Evidence("no telemetry ever in this watch", from_ms=since_ms),), job_of(window, node.name),
        )  # fmt: skip
    if clock_wrong:  # its samples carry a time that is over: they come, but too late for any bucket
        return Finding(
            NAME, IncidentKind.LIVENESS, "silent", "node", node.name, None, ((node.name, None),), now_ms, since_ms,
            Severity.WARNING, 0.5, RecommendedAction.ADVISE,
            f"Node {node.name} cannot be watched: nothing of the present time came for {duration(quiet_ms)}, and "
            "its clock is known to be wrong.",
            "Mend the node's time service (chrony, NTP) first; if it stays silent then, check its power and console.",
            (Evidence(f"no telemetry of {node.name} within its bucket's time", from_ms=since_ms),),
            job_of(window, node.name),
        )  # fmt: skip
    return Finding(
        NAME,
        IncidentKind.LIVENESS,
        "silent",
        "node",
        node.name,
        None,
        ((node.name, None),),
        now_ms,
        since_ms,
        Severity.CRITICAL if long else Severity.WARNING,
        0.9 if long else 0.8,
        RecommendedAction.DRAIN if long else RecommendedAction.ADVISE,
        f"Node {node.name} has been silent for {duration(quiet_ms)} while other nodes report.",
        ("Drain the node if its scheduler does not hear it either. " if long else "")
        + "Check power and console of the node. If it runs, its agent or management network is at fault, not the node: "
        "jobs on it may be well.",
        (Evidence(f"no telemetry of {node.name} or its {node.gpus} GPUs", from_ms=since_ms),),
        job_of(window, node.name),
        lost_gpus=float(node.gpus),
    )


def node_late(window: Window, n: int, since_ms: int, quiet_ms: int, now_ms: int) -> Finding:
    node = window.index.nodes[n].name
    return Finding(
        NAME, IncidentKind.LIVENESS, "late", "node", node, None, ((node, None),), now_ms, since_ms, Severity.WARNING,
        0.5, RecommendedAction.ADVISE,
        f"Node {node} cannot be watched: its agent sends, but for {duration(quiet_ms)} nothing came in time.",
        "Look at the load of the collector and at the network to this node: it may be well, and so may its jobs.",
        (Evidence(f"no telemetry of {node} within its bucket's time", from_ms=since_ms),), job_of(window, node),
    )  # fmt: skip


def no_gpu_answers(window: Window, node: str, never: bool, since_ms: int, count: int, now_ms: int) -> Finding:
    cause = "driver_missing" if never else "driver_lost"
    what = "has given no GPU telemetry yet" if never else f"no longer gives telemetry of any of its {count} GPUs"
    return Finding(
        NAME,
        IncidentKind.LIVENESS,
        cause,
        "node",
        node,
        None,
        ((node, None),),
        now_ms,
        since_ms,
        Severity.WARNING if never else Severity.CRITICAL,
        0.9,
        RecommendedAction.ADVISE if never else RecommendedAction.DRAIN,
        f"Node {node} {what}, while its agent reports.",
        "Drain the node. See whether its driver answers (nvidia-smi, kernel log); if not, reboot it."
        if not never
        else "Check the driver there (nvidia-smi, kernel log) and the number of GPUs in fleet.toml.",
        (Evidence(f"values of 0 of {count} GPUs", from_ms=since_ms),),
        job_of(window, node),
        lost_gpus=float(count),
    )


def gpu_gone(window: Window, node: str, gpu: int, never: bool, since_ms: int, now_ms: int, said: str = "") -> Finding:
    what = "should exist and was never seen" if never else "no longer answers"
    g = window.index.gpu(node, gpu)
    return Finding(
        NAME,
        IncidentKind.LIVENESS,
        "gpu_missing" if never else "gpu_lost",
        "gpu",
        node,
        gpu,
        ((node, gpu),),
        now_ms,
        since_ms,
        Severity.WARNING if never else Severity.CRITICAL,
        0.9,
        RecommendedAction.ADVISE if never else RecommendedAction.DRAIN,
        f"{place(node, gpu)} {what}; its node and agent are up.",
        "Compare nvidia-smi with the number of GPUs in fleet.toml; reseat or replace the GPU."
        if never
        else "Drain the node and reboot it; if the GPU stays away, reseat or replace it.",
        (Evidence(said or "no values of this GPU while its neighbours report", from_ms=since_ms),),
        window.job_of(g) if g is not None else None,
        lost_gpus=1.0,
    )


def job_of(window: Window, node: str) -> str | None:
    n = window.index.node_number.get(node)
    if n is None or not window.index.nodes[n].gpus:
        return None
    return window.job_of(int(window.index.first_gpu[n]))
