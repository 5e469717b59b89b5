"""Write the findings about silent nodes and GPUs."""

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


def planned(window: Window, node: str, stopped_ms: int, now_ms: int, scraped: bool = False) -> Finding:
    """Return the finding for a node that nobody reads, on purpose. `scraped`: it has no agent, but pages."""
    why, advice, evidence = (
        "its agent was stopped on purpose", "Start drover-agent again when the work on the node is done.",
        "the agent reported that it was asked to stop",
    ) if not scraped else (
        "it was taken off the list of exporters' pages",
        "Take it out of the fleet file too, or put its pages back on the list.", "no list of targets names it any more",
    )  # fmt: skip
    return Finding(
        NAME, IncidentKind.LIVENESS, "agent_stopped", "node", node, None, ((node, None),), now_ms, stopped_ms,
        Severity.INFO, 0.95, RecommendedAction.NONE, f"Node {node} is not monitored: {why}.", advice,
        (Evidence(evidence, from_ms=stopped_ms),), job_of(window, node),
    )  # fmt: skip


def worked_on_silent(window: Window, n: int, now_ms: int) -> Finding:
    """Return the finding for a node that fell silent while people work on it. It asks for nothing."""
    node = window.index.nodes[n].name
    since_ms = window.maintained[node]
    return Finding(
        NAME, IncidentKind.LIVENESS, "maintenance", "node", node, None, ((node, None),), now_ms, since_ms,
        Severity.INFO, 0.95, RecommendedAction.NONE,
        f"Node {node} is not monitored: it does not report while people work on it.",
        "Nothing, until the work is done. If it is still silent then, that is reported at once.",
        (Evidence("no telemetry since planned work began", from_ms=since_ms),), job_of(window, node),
    )  # fmt: skip


def mass_silent(window: Window, silent: Bools, present: Bools, since_ms: int, now_ms: int) -> Finding:
    names = [window.index.nodes[n].name for n in np.flatnonzero(silent)]
    count = int(present.sum())
    who = "No node reports" if not count else f"Only {count} of {len(present)} nodes report"
    return Finding(
        NAME, IncidentKind.LIVENESS, "no_telemetry", "rack", None, None, tuple((name, None) for name in names), now_ms,
        since_ms, Severity.CRITICAL, 0.6, RecommendedAction.NONE, f"{who}: {len(names)} fell silent at once.",
        "Check the collector, its certificates and its network first. The nodes may all be healthy.",
        (Evidence(f"no telemetry from {listing(names)}", from_ms=since_ms),),
    )  # fmt: skip


def group_silent(window: Window, scope: str, name: str, inside: Bools, since_ms: int, now_ms: int) -> Finding:
    names = [window.index.nodes[n].name for n in np.flatnonzero(inside)]
    suspects = "its power, cooling and top-of-rack switch" if scope == "rack" else "the leaf switch and its uplinks"
    gpus = sum(window.index.nodes[n].gpus for n in np.flatnonzero(inside))
    return Finding(
        NAME, IncidentKind.LIVENESS, "silent", scope, None, None, tuple((node, None) for node in names), now_ms,
        since_ms, Severity.CRITICAL, 0.8, RecommendedAction.ADVISE,
        f"All {len(names)} nodes of {scope} {name} fell silent while others report.",
        f"Check {suspects} before any single node.",
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
            f"Node {node.name} is in fleet.toml and has not reported since the collector started.",
            "Check that the node is up and drover-agent runs there, or remove it from fleet.toml.",
            (Evidence("no telemetry since the collector started", from_ms=since_ms),), job_of(window, node.name),
        )  # fmt: skip
    if clock_wrong:  # its samples have old times and miss their buckets
        return Finding(
            NAME, IncidentKind.LIVENESS, "silent", "node", node.name, None, ((node.name, None),), now_ms, since_ms,
            Severity.WARNING, 0.5, RecommendedAction.ADVISE,
            f"Node {node.name} cannot be monitored: no samples with a current time for {duration(quiet_ms)}, and its"
            " clock is wrong.",
            "Repair the node's time service (chrony, NTP) first. If it stays silent, check its power and console.",
            (Evidence(f"no telemetry of {node.name} arrived in time", from_ms=since_ms),),
            job_of(window, node.name),
        )  # fmt: skip
    return Finding(
        NAME, IncidentKind.LIVENESS, "silent", "node", node.name, None, ((node.name, None),), now_ms, since_ms,
        Severity.CRITICAL if long else Severity.WARNING, 0.9 if long else 0.8,
        RecommendedAction.DRAIN if long else RecommendedAction.ADVISE,
        f"Node {node.name} has been silent for {duration(quiet_ms)} while other nodes report.",
        ("Drain the node if its scheduler cannot reach it either. " if long else "")
        + "Check power and console of the node. If it is running, its agent or management network is at fault, and its"
        " jobs may be healthy.",
        (Evidence(f"no telemetry of {node.name} or its {node.gpus} GPUs", from_ms=since_ms),),
        job_of(window, node.name), lost_gpus=float(node.gpus), snapshot={"goes_on": False},
    )  # fmt: skip


def node_cut_off(window: Window, n: int, since_ms: int, quiet_ms: int, now_ms: int) -> Finding:
    """Return the finding for a silent node whose job computes on its other nodes as before. No drain is asked for."""
    node = window.index.nodes[n]
    return Finding(
        NAME, IncidentKind.LIVENESS, "silent", "node", node.name, None, ((node.name, None),), now_ms, since_ms,
        Severity.WARNING, 0.8, RecommendedAction.ADVISE,
        f"Node {node.name} has been silent for {duration(quiet_ms)}, but its job goes on: the node seems to run.",
        f"Check drover-agent on {node.name} and the management network to it. Check the node itself if its job's nodes"
        " do not depend on each other, as replicas of a service do not.",
        (
            Evidence(f"no telemetry of {node.name} or its {node.gpus} GPUs", from_ms=since_ms),
            Evidence("the other nodes of its job draw as much power as before", from_ms=since_ms),
        ),
        job_of(window, node.name), lost_gpus=float(node.gpus), snapshot={"goes_on": True},
    )  # fmt: skip


def node_late(window: Window, n: int, since_ms: int, quiet_ms: int, now_ms: int) -> Finding:
    node = window.index.nodes[n].name
    return Finding(
        NAME, IncidentKind.LIVENESS, "late", "node", node, None, ((node, None),), now_ms, since_ms, Severity.WARNING,
        0.5, RecommendedAction.ADVISE,
        f"Node {node} cannot be monitored: its agent sends, but nothing arrived in time for {duration(quiet_ms)}.",
        "Check the collector's load and the network to this node. The node and its jobs may be healthy.",
        (Evidence(f"no telemetry of {node} arrived in time", from_ms=since_ms),), job_of(window, node),
    )  # fmt: skip


def driver_gone(window: Window, n: int, code: str, since_ms: int, now_ms: int) -> Finding:
    """Return the finding for a node whose agent reported `code`: a hung or missing driver."""
    node, gpus, hung = window.index.nodes[n].name, window.index.nodes[n].gpus, code == "driver_hung"
    return Finding(
        NAME, IncidentKind.LIVENESS, code, "node", node, None, ((node, None),), now_ms, since_ms,
        Severity.CRITICAL if hung else Severity.WARNING, 0.9,
        RecommendedAction.DRAIN if hung else RecommendedAction.ADVISE,
        f"Node {node}: calls into its NVIDIA driver do not return."
        if hung
        else f"Node {node} should have {gpus} GPUs but has no usable NVIDIA driver.",
        "Drain the node and reboot it: a hung driver does not recover by itself."
        if hung
        else "Load or install the driver (nvidia-smi must list the GPUs), or correct fleet.toml.",
        (Evidence(f"the agent reported {code}", from_ms=since_ms),), job_of(window, node), lost_gpus=float(gpus),
    )  # fmt: skip


def pages_silent(window: Window, n: int, since_ms: int, quiet_ms: int, now_ms: int, goes_on: bool) -> Finding:
    """Return the finding for a node without an agent whose exporters do not answer. It asks for no drain, ever."""
    node = window.index.nodes[n].name
    facts = [f"no page of its exporters was read for {duration(quiet_ms)}"]
    if goes_on:
        facts.append("the other nodes of its job draw as much power as before")
    return Finding(
        NAME, IncidentKind.LIVENESS, "pages_silent", "node", node, None, ((node, None),), now_ms, since_ms,
        Severity.WARNING, 0.5, RecommendedAction.ADVISE,
        f"The exporters of node {node} do not answer; whether the node is up is not known.",
        "Look at the node (ping, Slurm or Kubernetes). If it is up, restart its exporters, or check the network and"
        " the list of targets. An agent on the node would show which.",
        tuple(Evidence(text, from_ms=since_ms) for text in facts), job_of(window, node),
        snapshot={"goes_on": goes_on},
    )  # fmt: skip


def pages_without_gpus(window: Window, node: str, never: bool, since_ms: int, count: int, now_ms: int) -> Finding:
    """Return the finding for a node whose pages are read and have no GPU. It asks for no drain: see below."""
    return Finding(
        NAME, IncidentKind.LIVENESS, "pages_without_gpus", "node", node, None, ((node, None),), now_ms, since_ms,
        Severity.WARNING, 0.5, RecommendedAction.ADVISE,
        f"The pages of node {node} have {'had no' if never else 'no longer'} values of its {count} GPUs; whether these"
        " work is not known.",
        "Check that the exporter of its GPUs is among the targets and collects temperature, power and clocks. Then"
        " look at the driver (nvidia-smi or amd-smi, kernel log).",
        (Evidence(f"values of 0 of {count} GPUs", from_ms=since_ms),), job_of(window, node),
    )  # fmt: skip


def gpu_page_silent(window: Window, n: int, since_ms: int, now_ms: int) -> Finding:
    """Return the finding for a node whose GPUs' page is not read while its other pages are."""
    node, quiet = window.index.nodes[n].name, duration(window.newest.end_ms - since_ms)
    return Finding(
        NAME, IncidentKind.LIVENESS, "gpu_page_silent", "node", node, None, ((node, None),), now_ms, since_ms,
        Severity.WARNING, 0.5, RecommendedAction.ADVISE,
        f"The page of node {node}'s GPUs cannot be read, its other pages can; whether the GPUs work is not known.",
        "Run nvidia-smi or amd-smi on the node, with a timeout. If it hangs, the driver does: drain the node and reboot"
        " it. If it answers, look at the exporter of the GPUs and restart it.",
        (Evidence(f"no page of its GPUs was read for {quiet}, while its other pages were", from_ms=since_ms),),
        job_of(window, node),
    )  # fmt: skip


def page_without_gpu(
    window: Window, node: str, gpu: int, never: bool, since_ms: int, now_ms: int, sure: bool
) -> Finding:
    """Return the finding for a GPU that a page lacks. It asks for no drain: an exporter may be set to leave it out."""
    what = "is in fleet.toml and was never on its node's page" if never else "is no longer on its node's page"
    g = window.index.gpu(node, gpu)
    return Finding(
        NAME, IncidentKind.LIVENESS, "gpu_missing" if never else "gpu_lost", "gpu", node, gpu, ((node, gpu),), now_ms,
        since_ms, Severity.CRITICAL if sure and not never else Severity.WARNING, 0.7, RecommendedAction.ADVISE,
        f"{place(node, gpu)} {what}; the others are.",
        "Look at the GPU with nvidia-smi or amd-smi, and at the exporter's choice of devices. If the GPU does not"
        " answer, drain the node and reboot it.",
        (Evidence("no values of this GPU while its neighbours have some", from_ms=since_ms),),
        window.job_of(g) if g is not None else None, lost_gpus=1.0,
    )  # fmt: skip


def no_gpu_answers(window: Window, node: str, never: bool, since_ms: int, count: int, now_ms: int) -> Finding:
    cause = "driver_missing" if never else "driver_lost"
    what = "has sent no GPU telemetry yet" if never else f"no longer sends telemetry of any of its {count} GPUs"
    return Finding(
        NAME, IncidentKind.LIVENESS, cause, "node", node, None, ((node, None),), now_ms, since_ms,
        Severity.WARNING if never else Severity.CRITICAL, 0.9,
        RecommendedAction.ADVISE if never else RecommendedAction.DRAIN,
        f"Node {node} {what}, while its agent reports.",
        "Drain the node. Check whether its driver answers (nvidia-smi, kernel log); if not, reboot it."
        if not never
        else "Check the driver there (nvidia-smi, kernel log) and the number of GPUs in fleet.toml.",
        (Evidence(f"values of 0 of {count} GPUs", from_ms=since_ms),), job_of(window, node), lost_gpus=float(count),
    )  # fmt: skip


def gpu_gone(
    window: Window, node: str, gpu: int, never: bool, since_ms: int, now_ms: int, sure: bool, fact: str = ""
) -> Finding:
    """Return the finding for a GPU without values. `sure`: for so long, or by its agent's word, that it is lost."""
    grave = sure and not never
    what = "is in fleet.toml and was never seen" if never else "no longer answers"
    g = window.index.gpu(node, gpu)
    return Finding(
        NAME, IncidentKind.LIVENESS, "gpu_missing" if never else "gpu_lost", "gpu", node, gpu, ((node, gpu),), now_ms,
        since_ms, Severity.CRITICAL if grave else Severity.WARNING, 0.9 if sure or never else 0.7,
        RecommendedAction.DRAIN if grave else RecommendedAction.ADVISE,
        f"{place(node, gpu)} {what}; its node and agent are up.",
        "Compare nvidia-smi with the number of GPUs in fleet.toml; reseat or replace the GPU."
        if never
        else "Look at the GPU with nvidia-smi. If it stays away for longer, Drover asks for a drain."
        if not grave
        else "Drain the node and reboot it. If the GPU does not come back, reseat or replace it.",
        (Evidence(fact or "no values of this GPU while its neighbours report", from_ms=since_ms),),
        window.job_of(g) if g is not None else None, lost_gpus=1.0,
    )  # fmt: skip


def job_of(window: Window, node: str) -> str | None:
    n = window.index.node_number.get(node)
    if n is None or not window.index.nodes[n].gpus:
        return None
    return window.job_of(int(window.index.first_gpu[n]))
