"""Jobs and what reports of their work: from when to when, on which GPUs; training loops and inference servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drover_collector.store.base import Base, numbers, sql_string, sql_time_range, sql_timestamp, values
from drover_collector.store.schema.tables import samples_table
from drover_core.metrics.catalog import Scope, of_scope

LOOK_BACK_MS = 30 * 86_400_000  # a job that was longer is told to have begun then


@dataclass(frozen=True, slots=True)
class JobSpan:
    """A job that no GPU holds any more. `gpus`, `nodes`: how many it held."""

    job: str
    since_ms: int
    ended_ms: int
    gpus: int
    nodes: int


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """The newest values of a workload on a node, in catalog units; absent: no key."""

    node: str
    name: str
    ts_ms: int
    values: dict[str, float]


class Jobs(Base):
    def jobs_since(self, names: Sequence[str], now_ms: int) -> dict[str, int]:
        """Job -> when its first GPU was held, of those given. A requeued job keeps its first beginning."""
        if not names:
            return {}
        rows = self._clients.rows(
            "SELECT job, toUnixTimestamp64Milli(min(`from`)) AS since FROM holdings"
            f" WHERE job IN ({', '.join(map(sql_string, names))}) AND `from` >= {sql_timestamp(now_ms - LOOK_BACK_MS)}"
            " GROUP BY job"
        )
        return {row["job"]: row["since"] for row in rows}

    def ended_jobs(self, from_ms: int, to_ms: int) -> list[JobSpan]:
        """Jobs whose last GPU was let go in [from_ms, to_ms), the newest first."""
        held = (
            "SELECT node, gpu, job, toUnixTimestamp64Milli(`from`) AS since, toUnixTimestamp64Milli(leadInFrame(`from`)"
            " OVER (PARTITION BY node, gpu ORDER BY `from` ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING))"
            f" AS upto FROM holdings FINAL WHERE {sql_time_range(to_ms - LOOK_BACK_MS, to_ms, 'from')}"
        )
        rows = self._clients.rows(
            "SELECT job, min(since) AS since_ms, max(upto) AS ended_ms, uniqExact(node, gpu) AS gpus,"
            f" uniqExact(node) AS nodes FROM ({held}) WHERE job != '' GROUP BY job"
            f" HAVING countIf(upto = 0) = 0 AND ended_ms >= {int(from_ms)} ORDER BY ended_ms DESC, job"
        )
        return [JobSpan(**row) for row in rows]

    def job_members(self, job: str) -> list[tuple[str, int]]:
        """(node, slot) of each GPU that the job ever held, in order."""
        rows = self._clients.rows(
            "SELECT DISTINCT node, gpu FROM holdings WHERE job = {job:String} ORDER BY node, gpu", {"job": job}
        )
        return [(row["node"], row["gpu"]) for row in rows]

    def workloads(self, now_ms: int, within_ms: int) -> list[WorkloadRow]:
        """What reports on any node, none older than `within_ms`, by node and name."""
        metrics = [metric.name for metric in of_scope(Scope.WORKLOAD)]
        newest = ", ".join(f"argMax(`{name}`, ts) AS `{name}`" for name in metrics)  # skips NULL
        table = self._clients.arrow(
            f"SELECT entity_id, toUnixTimestamp64Milli(max(ts)) AS ts_ms, {newest}"
            f" FROM {samples_table(Scope.WORKLOAD)} WHERE {sql_time_range(now_ms - within_ms, now_ms + 1)}"
            " GROUP BY entity_id"
        )
        ids, ts = numbers(table, "entity_id"), numbers(table, "ts_ms")
        nodes, links = self._placements.names(Scope.WORKLOAD, ids, ts)
        columns = {name: values(table, name) for name in metrics}
        rows = [
            WorkloadRow(
                str(nodes[at]),
                str(links[at]),
                int(ts[at]),
                {name: float(column[at]) for name, column in columns.items() if not np.isnan(column[at])},
            )
            for at in np.flatnonzero(nodes != "").tolist()
        ]
        return sorted(rows, key=lambda row: (row.node, row.name))
