"""Is it safe to give a node back? What is known of it since it was taken out, for and against."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from drover_collector.actions.node_outage import is_out
from drover_collector.api.snapshot import REPORTING_MS, ApiSnapshot
from drover_core.model.events import (
    Incident,
    NodeOutage,
    ProbeVerdict,
    Severity,
)
from drover_core.times import iso

SHOWN = 5  # open incidents


def grounds(facts: ApiSnapshot, node: str, duty: NodeOutage) -> tuple[bool | None, list[str]]:
    """Whether what is known speaks for giving `node` back (None: nothing proves it either way), and why, a sentence
    each.

    Raises:
        StoreError: its history cannot be read.
    """
    # Its stages since it last served, the newest first.
    stages = list(takewhile(is_out, reversed(facts.store.outages.history(node)))) or [duty]
    out_ms = stages[-1].ts_ms
    opened = [i for i in facts.open_by_node().get(node, []) if i.severity is not Severity.INFO]
    silent_ms = facts.now_ms() - int(facts.last_seen()[facts.node_number(node)])
    verdicts = facts.store.probes.verdicts.read(node=node, from_ms=out_ms)
    return judged(stages[-1], duty, opened, silent_ms, verdicts)


def judged(
    first: NodeOutage, now: NodeOutage, opened: Sequence[Incident], silent_ms: int, verdicts: Sequence[ProbeVerdict]
) -> tuple[bool | None, list[str]]:
    """Pure. `first`, `now`: how it was taken out, and its present stage. `verdicts`: since then, the oldest first."""
    by = "" if first.by == "drover" else f", by {first.by}"
    told = [f"Out since {iso(first.ts_ms)}{by}: {_reason(first)}."]
    if now.stage is not first.stage:
        told.append(f"Now {now.stage}: {_reason(now)}.")
    own = [incident for incident in opened if incident.scope in ("gpu", "node")]
    against = [f"Still open: {incident.summary}" for incident in own[:SHOWN]]
    if len(own) > SHOWN:
        against.append(f"{len(own) - SHOWN} more incidents of it are open.")
    if silent_ms > REPORTING_MS:
        against.append("Nothing is heard of it: what it is like now is not known.")
    newest = [v for v in verdicts if v.request == verdicts[-1].request]  # of the last probes, the node's and its GPUs'
    failed = [verdict for verdict in newest if verdict.passed is False]
    against += [f"Its probes of {iso(v.ts_ms)} failed: {v.text}" for v in failed]
    passed = bool(newest) and all(verdict.passed for verdict in newest)
    if passed:
        whole = next((v for v in newest if v.gpu is None), newest[-1])
        told.append(f"Its probes of {iso(whole.ts_ms)}, since it was taken out, passed: {whole.text}")
    elif not newest:
        told.append("It was not probed since it was taken out: nothing proves that it is well.")
    elif not failed:
        told.append(f"Its probes of {iso(newest[-1].ts_ms)} could not be judged: {newest[-1].text}")
    around = [incident for incident in opened if incident not in own]  # no fault of the node, but it will meet it
    told += [f"Open around it, not on it: {incident.summary}" for incident in around[:SHOWN]]
    if first.returns:
        told.append(f"It came back {first.returns} times before, and failed again.")
    return (False if against else True if passed else None), [*against, *told]


def _reason(duty: NodeOutage) -> str:
    return duty.reason.rstrip(".") or "no reason was given"
