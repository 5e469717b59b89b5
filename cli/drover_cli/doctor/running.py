"""Findings out of what a running collector says of itself (Fleet API). Pure."""

from __future__ import annotations

import re

from drover_cli.doctor.finding import Finding, FindingState, bad, ok, unknown, warn
from drover_cli.output import ago, duration, plain, size_text
from drover_core import VERSION
from drover_proto import fleet_pb2 as pb

JUDGED_S = 90.0  # as the alert DroverNotJudging
WAITS_S = 300.0  # as DroverReceiverFails
LAG_S = 60.0  # as DroverTelemetryLate
DAYS_LEFT = 7.0  # as DroverStoreFullSoon
ROLLUP_S = 3600.0  # as DroverRollupsLate
END_S = 14 * 86_400
NAMED = 4
# Kind of trouble with agents -> state, and what to do.
AGENTS: dict[str, tuple[FindingState, str]] = {
    "refused": (FindingState.BAD, "drover-agent check on that node; docs/how-to/tls.md has what each refusal means"),
    "rival": (FindingState.BAD, "two agents have one name or one spool: stop one, or give it a node of its own"),
    "silent": (FindingState.WARN, "systemctl status drover-agent there; what do they share? rack, switch, version"),
    "never": (FindingState.WARN, "install the agent there, or take the node out of the fleet file"),
    "lag": (FindingState.WARN, "its data waits: the store, or the way there; drover runbook DroverTelemetryLate"),
    "clock": (FindingState.WARN, "timedatectl set-ntp true, or chrony, on that node"),
    "spool": (FindingState.WARN, "the way to the collector is too slow, or was away: does it fall?"),
    "source": (FindingState.WARN, "drover-agent check there names the source and what to do"),
    "unknown": (FindingState.WARN, "add it to the fleet file and restart the collector, or stop its agent"),
}


def findings(status: pb.Status, system: pb.System) -> list[Finding]:
    return [
        *version(system),
        *blindness(status),
        *detection(system),
        *agents(system),
        *agent_versions(system),
        *scraping(system),
        *lag(system),
        *store(system),
        *notifiers(system),
        *refusals(system),
        *certificate(system),
        *troubles(status),
    ]


def version(system: pb.System) -> list[Finding]:
    if system.version != VERSION:
        text = f"the collector runs {plain(system.version)}, this command is {VERSION}"
        return [warn("version", text, "use one release on this machine: docs/how-to/roll-out.md")]
    return [ok("version", f"the collector runs {VERSION}")]


def blindness(status: pb.Status) -> list[Finding]:
    return [bad("sight", plain(line), "drover runbook DroverBlind") for line in status.blind]


def detection(system: pb.System) -> list[Finding]:
    state = system.detection
    if state.role != "active":
        text = f"this collector's part is {plain(state.role) or 'not reported'}: another one detects"
        return [ok("detection", text)]
    found = []
    late_s = (system.ts_ms - max(state.newest_tick_ms, system.started_ms)) / 1000
    if late_s > JUDGED_S:
        text = f"nothing was judged for {duration(late_s)}"
        found.append(bad("detection", text, "drover runbook DroverNotJudging"))
    elif not state.newest_tick_ms:
        found.append(unknown("detection", "nothing is judged yet: it has just begun", "ask again in a minute"))
    else:
        found.append(ok("detection", f"judged {ago(state.newest_tick_ms, system.ts_ms)}, took {state.tick_s:.2f} s"))
    if state.tick_s > 0.8 * state.interval_s > 0:
        text = f"a tick takes {state.tick_s:.1f} of {state.interval_s:g} s"
        found.append(warn("detection", text, "drover runbook DroverTicksSlow"))
    if state.skipped:
        text = f"{state.skipped} buckets were left out since the start"
        found.append(warn("detection", text, "drover runbook DroverBucketsSkipped"))
    for detector in state.detectors:
        if detector.failures:
            text = f"detector {detector.name} failed {detector.failures} times: {plain(detector.newest_failure)}"
            found.append(bad("detection", text, "drover runbook DroverDetectorFails"))
    if state.failures:
        text = f"judging failed {state.failures} times since the start"
        found.append(bad("detection", text, "drover runbook DroverEngineFails"))
    return found


def agents(system: pb.System) -> list[Finding]:
    """Of all nodes, by what is wrong with them."""
    state, found = system.agents, []
    for kind, count in sorted(state.trouble_counts.items()):
        grave, remedy = AGENTS.get(kind, (FindingState.WARN, "drover nodes"))
        listed = [trouble for trouble in state.troubles if trouble.kind == kind]
        named = ", ".join(plain(trouble.node) for trouble in listed[:NAMED])
        more = f" and {count - NAMED} more" if count > NAMED else ""
        text = f"{named}{more}: {plain(listed[0].text)}" if listed else f"{count} nodes: {kind}"
        found.append(Finding("agents", grave, text, remedy))
    head = f"{state.reporting} of {state.expected} nodes report"
    if not state.expected or state.reporting * 2 < state.expected:
        return [bad("agents", head, "drover runbook DroverManyAgentsMissing"), *found]
    return [ok("agents", head), *found]


def agent_versions(system: pb.System) -> list[Finding]:
    """Agents and collectors may be one version apart, either way."""
    ours, found = _release(system.version), []
    for version in system.agents.versions:
        theirs = _release(version.version)
        if theirs is None or ours is None:
            if version.version:
                text = f"{version.nodes} agents run {plain(version.version)}, which is no release"
                found.append(unknown("agent versions", text, "drover nodes shows which; ansible upgrade.yml"))
        elif abs(theirs[1] - ours[1]) > 1 or theirs[0] != ours[0]:
            theirs_text = f"{version.nodes} agents run {plain(version.version)}"
            text = f"{theirs_text}, the collector {plain(system.version)}: too far apart"
            found.append(bad("agent versions", text, "ansible-playbook upgrade.yml; one version apart is fine"))
        elif theirs != ours:
            text = f"{version.nodes} agents run {plain(version.version)}, the collector {plain(system.version)}"
            found.append(warn("agent versions", text, "finish the rollout: ansible-playbook upgrade.yml"))
    known = [version.version for version in system.agents.versions if version.version]
    silent = sum(version.nodes for version in system.agents.versions if not version.version)
    if known and not found:
        rest = f"; of {silent} nodes it is not known" if silent else ""
        return [ok("agent versions", f"all run {plain(known[0])}{rest}")]
    if silent and not known:
        return [unknown("agent versions", f"not known of {silent} nodes", "those that report send it: see agents")]
    return found


def scraping(system: pb.System) -> list[Finding]:
    """Of nodes without an agent: whose pages fail, and which detectors are blind."""
    if not system.HasField("scraping"):
        return []
    state = system.scraping
    head = f"{state.pages} pages of {state.nodes} nodes without an agent are read"
    found = [ok("scrape", head)] if state.pages and not state.failing else []
    if not state.pages:
        found.append(unknown("scrape", "no page of an exporter has been read yet", "ask again in a minute"))
    if state.failing:
        named = "; ".join(plain(text) for text in state.failing_pages[:NAMED])
        more = f"; and {state.failing - NAMED} more" if state.failing > NAMED else ""
        text = f"{state.failing} of {state.pages} pages cannot be read, so their nodes are unknown: {named}{more}"
        found.append(warn("scrape", text, "curl the page from this machine; is the exporter up, and the list right?"))
    if state.with_agent:
        text = f"{state.with_agent} nodes have an agent, and are scraped too: the agent's values are used"
        found.append(warn("scrape", text, "take them off the list of targets"))
    for text, samples in sorted(state.unused.items()):
        remedy = "docs/how-to/without-agents.md, sections By remote_write and By OTLP: clocks, labels, outages"
        found.append(warn("received", f"{samples} samples were not used since the start: {plain(text)}", remedy))
    for text, nodes in sorted(state.blind.items()):
        remedy = "docs/how-to/without-agents.md; an agent on the node sees it"
        found.append(unknown("blind", f"{nodes} nodes: {plain(text)}", remedy))
    return found


def _release(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)(?:\.|$)", text)
    return None if match is None else (int(match[1]), int(match[2]))


def lag(system: pb.System) -> list[Finding]:
    state, found = system.agents, []
    if not state.HasField("lag_median_s"):
        return [unknown("lag", "no node reports, so nobody knows", "see agents")]
    text = f"the newest stored sample is {state.lag_median_s:.1f} s old in the median, {state.lag_max_s:.1f} s at most"
    if state.lag_median_s > LAG_S:
        found.append(bad("lag", text, "drover runbook DroverTelemetryLate"))
    else:
        found.append(ok("lag", text))
    ingest = system.ingest
    if ingest.waiting_limit_bytes and ingest.waiting_bytes > ingest.waiting_limit_bytes / 2:
        text = f"{size_text(ingest.waiting_bytes)} wait for the store, of {size_text(ingest.waiting_limit_bytes)}"
        found.append(warn("lag", text, "drover runbook DroverBackoff"))
    return found


def store(system: pb.System) -> list[Finding]:
    """Whether it answers, is whole, and has room for what is to be kept."""
    state = system.store
    if not state.answers:
        return [bad("stored data", "the store does not answer", "drover runbook DroverStoreNotAnswering")]
    found = [ok("stored data", f"{size_text(state.bytes)} in {len(state.tables)} tables, brought forward at the start")]
    if state.damaged_parts:
        text = f"{state.damaged_parts} parts are damaged and set aside"
        found.append(bad("stored data", text, "drover runbook DroverStoreDamaged"))
    if state.HasField("days_left") and state.days_left < DAYS_LEFT:
        text = f"at this rate the disk is full in {duration(state.days_left * 86_400)}, then the oldest samples go"
        found.append(warn("stored data", text, "drover runbook DroverStoreFullSoon"))
    if state.dropped_bytes:
        text = f"{size_text(state.dropped_bytes)} were deleted for room within 24 h"
        found.append(warn("stored data", text, "drover runbook DroverSamplesDeletedForRoom"))
    if state.rollup_oldest_s > ROLLUP_S:
        text = f"rollups of late data wait for {duration(state.rollup_oldest_s)}"
        found.append(warn("stored data", text, "drover runbook DroverRollupsLate"))
    return found


def notifiers(system: pb.System) -> list[Finding]:
    found = []
    for receiver in system.notifiers:
        name = f"{plain(receiver.name)} ({plain(receiver.kind)})"
        if receiver.trouble or receiver.oldest_s > WAITS_S:
            waits = f"{receiver.pending} messages wait, the oldest for {duration(receiver.oldest_s)}"
            text = f"{name}: {waits}" + (f"; {plain(receiver.trouble)}" if receiver.trouble else "")
            made = bad if receiver.oldest_s > WAITS_S else warn
            found.append(made("receivers", text, "drover runbook DroverReceiverFails"))
        elif receiver.given_up:
            text = f"{name}: {receiver.given_up} messages were given up since the start"
            found.append(warn("receivers", text, "drover runbook DroverMessagesGivenUp"))
        else:
            found.append(ok("receivers", f"{name}: {receiver.delivered} delivered, {receiver.pending} wait"))
    return found


def refusals(system: pb.System) -> list[Finding]:
    found = []
    for what, counts in (("connections", system.ingest.calls_refused), ("messages", system.ingest.rejected)):
        if counts:
            listed = ", ".join(f"{plain(reason)} {count}" for reason, count in sorted(counts.items()))
            remedy = "the collector's log names who; docs/how-to/tls.md has what each refusal means"
            found.append(warn("refusals", f"{what} refused since the start: {listed}", remedy))
    return found


def certificate(system: pb.System) -> list[Finding]:
    if not system.certificate_ends_ms:
        return []
    left_s = (system.certificate_ends_ms - system.ts_ms) / 1000
    if left_s > END_S:
        return [ok("certificate in force", f"ends in {duration(left_s)}")]
    made = bad if left_s < 86_400 else warn
    text = f"ends in {duration(left_s)}" if left_s > 0 else "has ended: nobody can connect"
    return [made("certificate in force", text, "drover runbook DroverCertificateEnds")]


def troubles(status: pb.Status) -> list[Finding]:
    """What else the collector reports, in its own words."""
    rest = [line for line in status.troubles if line not in status.blind]
    return [warn("collector says", plain(line), "drover status; its log has more") for line in rest]
