"""What `drover policy backtest` shows: two policies side by side, and each node that either would have taken out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from drover_cli.output import duration, print_table, when, where
from drover_cli.scoring.score import EARLY_MS, LATE_MS, Label
from drover_core.times import iso

if TYPE_CHECKING:
    from drover_collector.policy.backtest import Backtest, Outage
    from drover_core.model.events import Decision, Incident
    from drover_proto.fleet_pb2 import ActionLine

SHOWN = 40  # lines of a table
WITHOUT_DRAIN = frozenset({"risk", "idle", "drift", "slowdown"})  # kinds of faults that nobody drains for
SICK, HEALTHY = "sick", "healthy"


@dataclass(frozen=True, slots=True)
class Drain:
    """A node that one of the two policies, or both, would have taken out.

    Attributes:
        outages: the outage under the old policy and under the new one; None: not taken out.
        outcomes: what each policy decided.
        truth: (SICK or HEALTHY, the fault) by the labels of a case; ("", ""): unknown.
    """

    node: str
    incident: Incident
    outages: tuple[Outage | None, Outage | None]
    outcomes: tuple[str, str]
    truth: tuple[str, str]

    @property
    def from_ms(self) -> int:
        return min(outage.from_ms for outage in self.outages if outage is not None)

    @property
    def truth_text(self) -> str:
        return ": ".join(filter(None, self.truth))

    def gpu_hours(self, results: Sequence[Backtest]) -> list[float]:
        """Return the GPU-hours out of service under each policy."""
        return [
            0.0 if outage is None else outage.hours(result.until_ms) * outage.gpus
            for outage, result in zip(self.outages, results, strict=True)
        ]

    @property
    def why(self) -> str:
        """Return the evidence in one line."""
        facts = [fact.text for fact in self.incident.evidence if fact.text and fact.text not in self.incident.summary]
        return " | ".join([self.incident.summary, *facts[:1]])


@dataclass(frozen=True)
class Table:
    """The comparison of two policies, as text and as JSON.

    Args:
        results: of the old policy and of the new one.
        labels: what was wrong, from a case; None: unknown.
        is_present: the old policy is in force now.
        in_fact: what Drover did with nodes in that time; None: unknown.
    """

    results: tuple[Backtest, Backtest]
    incidents: Sequence[Incident]
    labels: Sequence[Label] | None = None
    is_present: bool = False
    in_fact: Sequence[ActionLine] | None = None

    @cached_property
    def drains(self) -> list[Drain]:
        """Return all drains, the earliest first. An outage of both policies for the same incident is one drain."""
        by_id = {incident.id: incident for incident in self.incidents}
        old, new = (result.outages for result in self.results)
        found, matched = [], set[int]()
        for outage in old:
            same = next((o for o in new if id(o) not in matched and _same(o, outage)), None)
            if same is not None:
                matched.add(id(same))
            found.append((outage, same))
        pairs: list[tuple[Outage | None, Outage | None]] = [*found, *((None, o) for o in new if id(o) not in matched)]
        drains = []
        for pair in pairs:
            one = pair[0] or pair[1]
            assert one is not None
            incident = by_id[one.incidents[0]]
            outcomes = (
                self.results[0].outcome(incident.id) if pair[0] is None else pair[0].wanted.value,
                self.results[1].outcome(incident.id) if pair[1] is None else pair[1].wanted.value,
            )
            from_ms = min(outage.from_ms for outage in pair if outage is not None)
            drains.append(Drain(one.node, incident, pair, outcomes, self.truth(one.node, from_ms)))
        return sorted(drains, key=lambda drain: (drain.from_ms, drain.node))

    def truth(self, node: str, at_ms: int) -> tuple[str, str]:
        """Return what was wrong with a node at that time, as `Drain.truth`."""
        if self.labels is None:
            return "", ""
        there = [label for label in self.labels if _holds(label, at_ms) and any(n == node for n, _ in label.members)]
        sick = next((label for label in there if label.hardware), None)
        if sick is not None:
            return SICK, f"{sick.kind}/{sick.cause}"
        return HEALTHY, f"{there[0].kind}/{there[0].cause}" if there else ""

    def times_out(self, number: int, state: str) -> int:
        """Return how often policy `number` took out a node that was in that state (SICK, HEALTHY) then."""
        return sum(self.truth(outage.node, outage.from_ms)[0] == state for outage in self.results[number].outages)

    def missed(self, number: int) -> list[Label]:
        """Return the faults whose nodes all stayed in service during the fault under policy `number`."""
        outages = self.results[number].outages
        return [
            label
            for label in self.labels or ()
            if label.hardware
            and label.kind not in WITHOUT_DRAIN
            and not any(_overlaps(label, o) and any(n == o.node for n, _ in label.members) for o in outages)
        ]

    def json(self) -> dict[str, Any]:
        changed = [[i.id, *(r.outcome(i.id) for r in self.results)] for i in self.changed()]
        return {
            "incidents": len(self.incidents),
            "against": self._one(0) | {"present": self.is_present},
            "new": self._one(1),
            "in_fact": None if self.in_fact is None else [
                {"at": iso(a.ts_ms), "node": a.node, "act": a.act, "by": a.by, "incident": a.incident_id or None}
                for a in self.in_fact
            ],
            "drains": [
                {
                    "at": iso(drain.from_ms), "node": drain.node, "incident": drain.incident.id,
                    "what": f"{drain.incident.kind}/{drain.incident.cause}", "against": drain.outcomes[0],
                    "new": drain.outcomes[1], "truth": drain.truth_text or None, "why": drain.why,
                    "gpu_hours_out": [round(hours, 2) for hours in drain.gpu_hours(self.results)],
                }
                for drain in self.drains
            ],
            "changed": changed,
        }  # fmt: skip

    def _one(self, number: int) -> dict[str, object]:
        result = self.results[number]
        known = self.labels is not None
        return {
            "policy": result.policy,
            "wanted": dict(result.wanted),
            "nodes_out": sorted(result.out),
            "times_out": len(result.outages),
            "most_out_at_once": result.most_out,
            "node_hours_out": round(result.node_hours, 2),
            "gpu_hours_out": round(result.gpu_hours, 2),
            "sick_out": self.times_out(number, SICK) if known else None,
            "healthy_out": self.times_out(number, HEALTHY) if known else None,
            "faults_left": len(self.missed(number)) if known else None,
            "held": len({d.incident_id for d in result.held}),
            "mass_events": result.mass_events,
        }

    def changed(self) -> list[Incident]:
        """Return the incidents that the two policies decide differently, oldest first."""
        old, new = self.results
        found = [i for i in self.incidents if old.outcome(i.id) != new.outcome(i.id)]
        return sorted(found, key=lambda i: (i.opened_ms, i.id))

    # ---- as text

    def show(self) -> None:
        self._show_counts()
        self._show_drains()
        self._show_changed()
        for result in self.results:
            _show_held(result)

    def _show_counts(self) -> None:
        results = self.results
        rows: list[list[object]] = [["incidents", *[len(self.incidents)] * 2]]
        for word in ("advise", "probe", "drain", "isolate"):
            rows.append([f"wants {word}", *(r.wanted[word] for r in results)])
        rows.append(["nodes taken out, times", *(len(r.outages) for r in results)])
        if self.labels is not None:
            rows += [
                ["  that were sick", *(self.times_out(n, SICK) for n in (0, 1))],
                ["  that were healthy", *(self.times_out(n, HEALTHY) for n in (0, 1))],
                ["faults whose node stayed in service", *(len(self.missed(n)) for n in (0, 1))],
            ]
        rows += [
            ["different nodes", *(len(r.out) for r in results)],
            ["most out at once", *(r.most_out for r in results)],
            ["GPU-hours out, until the incident closed", *(f"{r.gpu_hours:.1f}" for r in results)],
            ["held back by the guard, incidents", *(len({d.incident_id for d in r.held}) for r in results)],
            ["mass events (a person is asked)", *(r.mass_events for r in results)],
        ]
        names = [r.policy for r in results]
        against = "present" if self.is_present else "against"
        print_table(["", f"{names[0]} ({against})", f"{names[1]} (new)"], rows, frozenset({1, 2}))
        if self.in_fact is not None:
            print(f"\n{self._done_text()}")

    def _done_text(self) -> str:
        """Say what Drover did in that time, under the policy that was in force then."""
        done = self.in_fact or ()
        if not done:
            return "in fact Drover took no node out in that time"
        by_hand = sum(line.by != "drover" for line in done)
        return (
            f"in fact, nodes that Drover took out in that time: {len({a.node for a in done})};"
            f" by itself {len(done) - by_hand} times, for a person {by_hand} times"
        )

    def _show_drains(self) -> None:
        drains = self.drains
        if not drains:
            print("\nneither would have taken a node out")
            return
        print("\nnodes taken out, and why:")
        truth = ["IN TRUTH"] if self.labels is not None else []
        rows: list[list[object]] = []
        for drain in drains[:SHOWN]:
            hours = [f"{h:.1f}" if h else "-" for h in drain.gpu_hours(self.results)]
            rows.append(
                [
                    when(drain.from_ms), drain.node, *drain.outcomes, *hours, *([drain.truth_text] if truth else []),
                    f"{drain.incident.kind}/{drain.incident.cause}", drain.why,
                ]
            )  # fmt: skip
        names = [r.policy for r in self.results]
        headers = ["OUT SINCE", "NODE", *names, *(f"GPU-H {name}" for name in names), *truth, "INCIDENT", "EVIDENCE"]
        print_table(headers, rows, frozenset({4, 5}))
        _more(len(drains))

    def _show_changed(self) -> None:
        drained = {drain.incident.id for drain in self.drains}
        changed = [i for i in self.changed() if i.id not in drained]
        if not changed:
            return
        print(f"\n{len(changed)} further incidents would be decided differently:")
        rows = [
            [
                when(i.opened_ms), where(i), f"{i.kind}/{i.cause}", i.severity,
                *(r.outcome(i.id) for r in self.results), _lasted(i),
            ]
            for i in changed[:SHOWN]
        ]  # fmt: skip
        print_table(["OPENED", "WHERE", "WHAT", "SEVERITY", *(r.policy for r in self.results), "LASTED"], rows)
        _more(len(changed))


def _show_held(result: Backtest) -> None:
    """Print the first reason for each node and incident."""
    held: dict[tuple[str, str], Decision] = {}
    for decision in result.held:
        held.setdefault((decision.incident_id, decision.node), decision)
    if held:
        print(f"\nheld back under {result.policy}:")
        rows = [[when(d.ts_ms), d.node, d.wanted, d.reason] for d in held.values()]
        print_table(["WHEN", "NODE", "WANTED", "WHY"], rows[:SHOWN])
        if len(rows) > SHOWN:
            print(f"{SHOWN} of {len(rows)} shown")


def _more(count: int) -> None:
    if count > SHOWN:
        print(f"{SHOWN} of {count} shown; --json has more")


def _same(a: Outage, b: Outage) -> bool:
    return a.node == b.node and bool(set(a.incidents) & set(b.incidents))


def _holds(label: Label, at_ms: int) -> bool:
    return label.start_ms - EARLY_MS <= at_ms and (label.end_ms is None or at_ms <= label.end_ms + LATE_MS)


def _overlaps(label: Label, outage: Outage) -> bool:
    ended = outage.to_ms is not None and outage.to_ms < label.start_ms - EARLY_MS
    return not ended and (label.end_ms is None or outage.from_ms <= label.end_ms + LATE_MS)


def _lasted(incident: Incident) -> str:
    if incident.closed_ms is None:
        return "still open"
    return duration((incident.closed_ms - incident.opened_ms) / 1000)
