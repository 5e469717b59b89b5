"""Several clusters, each with a collector of its own: what was last received of each, for pages that show all.

A thread for each cluster asks its collector; pages read what it has received and never wait. So a collector that hangs
holds up its own thread alone. What is old is said to be old: its GPUs count as unknown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from drover_core.clusters import ClusterSettings
from drover_core.model.events import SEVERITY_ORDER, WANTED_ORDER, Health, Incident, Severity
from drover_dashboard.client import Answer, ClientError, FleetClient, Tls
from drover_proto import fleet_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

ASK_S = 2.0  # between two questions to a collector
FRESH_MS = 12_000  # two questions may take 4 s each (client.DEADLINE_S), and the next come 2 s later
LISTED = 100  # open incidents of each cluster, the worst first
QUIET_MS = 60_000  # agents send every 5 s, 30 s at most
FIND_S = 2.0  # a search shows what came until then, and names who did not answer


@dataclass(frozen=True, slots=True)
class LastAnswers:
    """The last answers of one cluster's collector."""

    name: str
    status: Answer[pb.Status]
    incidents: Answer[pb.IncidentList]

    def fresh(self, now_ms: int) -> bool:
        """Whether the collector answers now, and what it said is of now."""
        trouble = self.status.trouble
        answers = self.status.value is not None and (trouble is None or trouble.slow)
        return answers and abs(now_ms - self.status.as_of_ms) <= FRESH_MS

    def incidents_fresh(self, now_ms: int) -> bool:
        """Whether its list of open incidents is of now: a collector may answer one question and not another."""
        trouble = self.incidents.trouble
        answers = self.incidents.value is not None and (trouble is None or trouble.slow)
        return self.fresh(now_ms) and answers and abs(now_ms - self.incidents.as_of_ms) <= FRESH_MS


class ClusterWatch:
    """Asks one collector again and again, in a thread of its own."""

    def __init__(self, client: FleetClient, every_s: float = ASK_S) -> None:
        self.client = client
        self._every_s = every_s
        self._received = LastAnswers(client.cluster, Answer(None, 0), Answer(None, 0))
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"cluster {client.cluster}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(timeout=10)

    def received(self) -> LastAnswers:
        return self._received

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                status = self.client.status()
                self._received = LastAnswers(self.client.cluster, status, self._received.incidents)
                self._received = LastAnswers(self.client.cluster, status, self.client.incidents("open", limit=LISTED))
            except Exception:  # its strip turns grey with the age of the last answer; the others go on
                log.exception("cluster %s could not be asked", self.client.cluster)
            self._end.wait(self._every_s)


class Clusters:
    """All clusters of this console, by name, in the order of the settings."""

    def __init__(self, clients: Sequence[FleetClient]) -> None:
        self._watches = {client.cluster: ClusterWatch(client) for client in clients}
        self._pool = ThreadPoolExecutor(2 * len(clients), thread_name_prefix="search")

    def start(self) -> None:
        for watch in self._watches.values():
            watch.start()

    def stop(self) -> None:
        for watch in self._watches.values():
            watch.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def names(self) -> list[str]:
        return list(self._watches)

    def client(self, name: str) -> FleetClient:
        return self._watches[name].client

    def received(self) -> list[LastAnswers]:
        return [watch.received() for watch in self._watches.values()]

    def ask_all(self, question: Callable[[FleetClient], T], limit_s: float = FIND_S) -> dict[str, T | None]:
        """Put a question to all at once; None for those that did not answer within `limit_s`."""
        asked = {name: self._pool.submit(question, watch.client) for name, watch in self._watches.items()}
        _, late = wait(asked.values(), limit_s)
        for future in late:
            future.cancel()  # what has begun ends at its client's deadline
        return {
            name: _result(name, future) if future.done() and not future.cancelled() else None
            for name, future in asked.items()
        }


def _result(name: str, future: Any) -> Any:
    error = future.exception()
    if error is not None:
        log.error("cluster %s could not be searched: %s", name, error)
        return None
    return future.result()


def clients(settings: ClusterSettings) -> list[FleetClient]:
    """
    Raises:
        ClientError: the certificates of a cluster cannot be used.
    """
    made = []
    for cluster in settings.clusters:
        tls = cluster.tls()
        try:
            made.append(FleetClient(cluster.collector, Tls(*tls) if tls else None, cluster=cluster.name))
        except ClientError as error:
            raise ClientError(f"cluster {cluster.name}: {error}") from None
    return made


# ---- what the strips show


def strips(received: Sequence[LastAnswers], now_ms: int) -> dict[str, Any]:
    """Return a strip for each cluster and one of all, as assets/clusters.js draws them. Pure."""
    rows = [_strip(one, now_ms) for one in received]
    return {"now_ms": now_ms, "clusters": rows, "total": _total(rows)}


def _strip(received: LastAnswers, now_ms: int) -> dict[str, Any]:
    status, trouble = received.status.value, received.status.trouble
    state = "fresh" if received.fresh(now_ms) else "never" if status is None else "old"
    if state == "never" and trouble is None:
        state = "asked"  # the console has just started: not answered yet, and no reason to say why not
    row: dict[str, Any] = {
        "name": received.name,
        "state": state,
        "as_of_ms": received.status.as_of_ms,
        "trouble": f"{trouble.reason}: {trouble.advice}" if trouble else "",
    }
    if status is None:
        return row
    return row | {
        "fleet": status.fleet, "mode": status.mode, "role": status.role,
        "nodes": status.nodes_expected, "reporting": status.nodes_reporting, "gpus": status.gpus_expected,
        "health": _health(status.gpus_by_health, status.gpus_expected),
        "incidents": {s.value: status.open_incidents_by_severity[s] for s in reversed(SEVERITY_ORDER)},
        "judged": bool(status.newest_tick_ms), "pending": status.pending, "notes": _notes(status),
    }  # fmt: skip


def _health(counted: Mapping[str, int], expected: int) -> dict[str, int]:
    """Return GPUs by health. A word of a newer collector, and GPUs that it does not count, are unknown."""
    found = dict.fromkeys(map(str, Health), 0)
    for word, count in counted.items():
        found[word if word in found else Health.UNKNOWN.value] += count
    found[Health.UNKNOWN.value] += max(0, expected - sum(found.values()))
    return found


def _notes(status: pb.Status) -> list[str]:
    """Return why a collector that answers does not see, judge or notify: its figures alone would look well."""
    notes = list(status.blind)
    if not status.newest_sample_ms:
        notes.append("It has no telemetry yet.")
    elif status.ts_ms - status.newest_sample_ms > QUIET_MS:
        notes.append(f"No telemetry for {(status.ts_ms - status.newest_sample_ms) // 60_000} min.")
    if status.HasField("receivers") and not status.receivers:
        notes.append("Nobody is notified of its incidents.")
    return notes


def _total(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sum. GPUs of a cluster that does not answer are unknown, whatever they were before."""
    fresh = [row for row in rows if row["state"] == "fresh"]
    old = [row for row in rows if row["state"] == "old"]
    health = {h.value: sum(row["health"][h.value] for row in fresh) for h in Health}
    health[Health.UNKNOWN.value] += sum(row["gpus"] for row in old)
    return {
        "answering": len(fresh), "clusters": len(rows), "uncounted": len(rows) - len(fresh) - len(old),
        "gpus": sum(row["gpus"] for row in (*fresh, *old)), "health": health,
        "incidents": {s.value: sum(row["incidents"][s.value] for row in fresh) for s in Severity},
        "judged": bool(fresh) and all(row["judged"] for row in fresh),
        "pending": sum(row["pending"] for row in fresh),
        "modes": {m: sum(row["mode"] == m for row in fresh) for m in sorted({row["mode"] for row in fresh})},
    }  # fmt: skip


# ---- incidents of all


@dataclass(frozen=True, slots=True)
class ClusterIncident:
    """An incident with its cluster; `old`: its collector does not answer now."""

    cluster: str
    incident: Incident
    old: bool
    silence: pb.SilenceNote | None = field(default=None, hash=False)
    handling: pb.IncidentHandling | None = field(default=None, hash=False)


def merged(found: Mapping[str, tuple[Sequence[Incident], pb.IncidentList]], old: set[str]) -> list[ClusterIncident]:
    """Return the incidents of all clusters in the order in which each collector has its own: the worst first. Pure."""
    rows = [
        ClusterIncident(
            cluster, incident, cluster in old, reply.silences.get(incident.id), reply.handling.get(incident.id)
        )
        for cluster, (incidents, reply) in found.items()
        for incident in incidents
    ]
    return sorted(rows, key=_worst_first)


def _worst_first(row: ClusterIncident) -> tuple[int, int, int, str, str]:
    incident = row.incident
    return (
        -SEVERITY_ORDER.index(incident.severity), -WANTED_ORDER.index(incident.action), -incident.opened_ms,
        row.cluster, incident.id,
    )  # fmt: skip


def now_ms() -> int:
    return time.time_ns() // 1_000_000


_shared: Clusters | None = None


def share(clusters: Clusters | None) -> None:
    """Make them the ones that this process shows; None: it has one collector."""
    global _shared
    _shared = clusters


def shared() -> Clusters | None:
    """Return the clusters of this console; None where it has one collector."""
    return _shared
