"""JobsOfGpus: which job holds each GPU, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from drover_collector.fleet.buckets import Ints
from drover_collector.fleet.index import FleetIndex
from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.records import Millis
from drover_collector.store.sql import coded, numbers, sql_ms, sql_string, sql_time_range, sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter
from drover_core.model.events import Holding, from_dict

LOOK_BACK_MS = 30 * 86_400_000  # a longer job counts as begun then
NAMED_MAX = 20_000  # GPUs that one query names
JobsOfGpus = tuple[Ints, tuple[str, ...]]  # int32 [G]: number of the job that holds each GPU, or -1; names by number


@dataclass(frozen=True, slots=True)
class JobSpan:
    """A job that has ended. `gpus`, `nodes`: how many it held."""

    job: str
    since_ms: int
    ended_ms: int
    gpus: int
    nodes: int


@dataclass(frozen=True, slots=True)
class JobChanges:
    """Changes of holders, in any order: int64 [K] each.

    Attributes:
        gpu: number in the index. job: number in `jobs`; -1: it was freed.
    """

    jobs: tuple[str, ...]
    gpu: npt.NDArray[np.int64]
    from_ms: npt.NDArray[np.int64]
    job: npt.NDArray[np.int64]


class JobTable:
    """When each GPU went to a job, and when it was freed."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write_holdings(self, holdings: Sequence[Holding]) -> None:
        columns: dict[str, Callable[[Holding], Any]] = {
            "node": lambda h: h.node,
            "gpu": lambda h: h.gpu,
            "from": lambda h: Ms(h.from_ms),
            "job": lambda h: h.job or "",
        }
        self._writer.insert("holdings", holdings, columns)
        self._writer.insert("holders", holdings, columns)

    def holdings(self, from_ms: int, to_ms: int) -> list[Holding]:
        """Return the changes within [from_ms, to_ms), after what was held at its beginning; oldest first."""
        columns = f"SELECT node, gpu, nullIf(job, '') AS job, {sql_ms('from')} AS from_ms"
        before = self._clients.rows(
            f"{columns} FROM (SELECT node, gpu, argMax(job, `from`) AS job, max(`from`) AS `from` FROM holdings"
            f" WHERE `from` < {sql_timestamp(from_ms)} GROUP BY node, gpu) WHERE job != '' ORDER BY `from`, node, gpu"
        )
        during_it = self._clients.rows(
            f"{columns} FROM holdings FINAL WHERE {sql_time_range(from_ms, to_ms, 'from')} ORDER BY `from`, node, gpu"
        )
        return [from_dict(Holding, row) for row in (*before, *during_it)]

    def at(self, index: FleetIndex, ts_ms: int) -> tuple[Ints, tuple[str, ...]]:
        """Return the job that holds each GPU at a time."""
        newest = self._clients.arrow(
            f"SELECT node, gpu, job, `from` > {sql_timestamp(ts_ms)} AS later FROM holders FINAL ORDER BY node, gpu"
        )
        later = newest.filter(pc.equal(newest["later"], 1)).select(["node", "gpu"]).to_pylist()
        found = [newest.filter(pc.equal(newest["later"], 0)).drop(["later"])]
        for at in range(0, len(later), NAMED_MAX):  # few change in the seconds after a bucket: read their history
            which = ", ".join(f"({sql_string(row['node'])}, {int(row['gpu'])})" for row in later[at : at + NAMED_MAX])
            before = self._clients.arrow(
                "SELECT node, gpu, argMax(job, `from`) AS job FROM holdings"
                f" WHERE (node, gpu) IN ({which}) AND `from` <= {sql_timestamp(ts_ms)} GROUP BY node, gpu"
            )
            found += [before] if before.num_rows else []
        held = pa.concat_tables(found)
        held = held.filter(pc.not_equal(held["job"], ""))
        jobs = np.full(index.gpu_count, -1, np.int32)
        if not held.num_rows:
            return jobs, ()
        gpus = _gpus_of(index, held)
        there = gpus >= 0
        names, job = coded(held["job"])
        used, codes = np.unique(np.array(names)[job[there]], return_inverse=True)
        jobs[gpus[there]] = codes
        return jobs, tuple(map(str, used))

    def at_times(self, index: FleetIndex, times_ms: list[int]) -> list[JobsOfGpus]:
        """Return the same as `at` for several times, which are in order."""
        newest = self._clients.arrow(
            "SELECT node, gpu, job, toUnixTimestamp64Milli(`from`) AS from_ms FROM holders FINAL ORDER BY node, gpu"
        )
        later = newest.filter(pc.greater(newest["from_ms"], times_ms[0])).select(["node", "gpu"]).to_pylist()
        parts = [newest]
        for at in range(0, len(later), NAMED_MAX):  # what changed meanwhile: read its history
            which = ", ".join(f"({sql_string(row['node'])}, {int(row['gpu'])})" for row in later[at : at + NAMED_MAX])
            of = f"FROM holdings WHERE (node, gpu) IN ({which}) AND `from`"
            queries = (  # who held it at the first time, and since: a GPU has thousands of holders in a year
                "SELECT node, gpu, argMax(job, `from`) AS job, toUnixTimestamp64Milli(max(`from`)) AS from_ms"
                f" {of} <= {sql_timestamp(times_ms[0])} GROUP BY node, gpu",
                f"SELECT node, gpu, job, toUnixTimestamp64Milli(`from`) AS from_ms"
                f" {of} > {sql_timestamp(times_ms[0])} AND `from` <= {sql_timestamp(times_ms[-1])}",
            )
            parts += [found.cast(newest.schema) for found in map(self._clients.arrow, queries) if found.num_rows]
        every = pa.concat_tables(parts)
        place = _gpus_of(index, every)
        there = np.flatnonzero(place >= 0)
        from_ms: Millis = numbers(every, "from_ms").astype(np.int64)[there]
        order = np.argsort(from_ms, kind="stable")
        place, from_ms = place[there][order], from_ms[order]
        names, job = coded(every["job"])
        job = job[there][order]
        return [_held_at(index, place, from_ms, np.array(names), job, at) for at in times_ms]

    def changes(self, index: FleetIndex, from_ms: int, to_ms: int) -> JobChanges:
        """Return who got each GPU, and when, within [from_ms, to_ms), with who held it at the beginning."""
        columns = "node, gpu, toUnixTimestamp64Milli({}) AS from_ms, {} AS job"
        parts = [
            self._clients.arrow(
                f"SELECT {columns.format('max(`from`)', 'argMax(job, `from`)')} FROM holdings"
                f" WHERE `from` < {sql_timestamp(from_ms)} GROUP BY node, gpu"
            ),
            self._clients.arrow(
                f"SELECT {columns.format('`from`', 'job')} FROM holdings FINAL"
                f" WHERE {sql_time_range(from_ms, to_ms, 'from')}"
            ),
        ]
        held = [part for part in parts if part.num_rows]
        if not held:
            return JobChanges((), *(np.zeros(0, np.int64) for _ in range(3)))
        every = pa.concat_tables([part.cast(held[0].schema) for part in held])
        gpu = _gpus_of(index, every).astype(np.int64)
        names, job = coded(every["job"])
        used = [name for name in names if name]
        place = {name: at for at, name in enumerate(used)}
        number = np.array([place.get(name, -1) for name in names], np.int64)
        there = gpu >= 0
        return JobChanges(
            tuple(used), gpu[there], numbers(every, "from_ms").astype(np.int64)[there], number[job][there]
        )  # fmt: skip

    def started(self, names: Sequence[str], now_ms: int) -> dict[str, int]:
        """Return job -> when its first GPU was held, of these jobs. A requeued job keeps its first start."""
        if not names:
            return {}
        rows = self._clients.rows(
            "SELECT job, toUnixTimestamp64Milli(min(`from`)) AS since FROM holdings"
            f" WHERE job IN ({', '.join(map(sql_string, names))}) AND `from` >= {sql_timestamp(now_ms - LOOK_BACK_MS)}"
            " GROUP BY job"
        )
        return {row["job"]: row["since"] for row in rows}

    def ended(self, from_ms: int, to_ms: int) -> list[JobSpan]:
        """JobsOfGpus whose last GPU was freed in [from_ms, to_ms), the newest first."""
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

    def members(self, job: str) -> list[tuple[str, int]]:
        """Return (node, slot) of each GPU that the job ever held, in order."""
        rows = self._clients.rows(
            "SELECT DISTINCT node, gpu FROM holdings WHERE job = {job:String} ORDER BY node, gpu", {"job": job}
        )
        return [(row["node"], row["gpu"]) for row in rows]

    def load_newest(self) -> None:
        """Fill the table of current holders in a store from before there was one."""
        some, filled = (self._clients.rows(f"SELECT 1 FROM {name} LIMIT 1") for name in ("holdings", "holders"))
        if some and not filled:
            self._clients.command(
                "INSERT INTO holders SELECT node, gpu, max(`from`), argMax(job, `from`)"
                " FROM holdings GROUP BY node, gpu"
            )


def _gpus_of(index: FleetIndex, rows: pa.Table) -> npt.NDArray[np.intp]:
    """Return the number of the GPU of each row of (node, gpu), -1 for one that the fleet does not have."""
    nodes, node = coded(rows["node"])
    if not nodes:
        return np.zeros(0, np.intp)
    number = np.array([index.node_number.get(name, -1) for name in nodes], np.intp)[node]
    slot = numbers(rows, "gpu").astype(np.intp)
    there = (number >= 0) & (slot >= 0) & (slot < np.diff(index.first_gpu)[number])
    return np.where(there, index.first_gpu[number] + slot, -1)


def _held_at(
    index: FleetIndex,
    place: npt.NDArray[np.intp],
    from_ms: Millis,
    names: npt.NDArray[np.str_],
    job: npt.NDArray[np.intp],
    at_ms: int,
) -> JobsOfGpus:
    """Return who holds each GPU at a time, out of all changes, which are in order of time."""
    upto = int(np.searchsorted(from_ms, at_ms, side="right"))
    newest = np.full(index.gpu_count, -1, np.intp)
    newest[place[:upto]] = job[:upto]  # the last of each GPU stays
    if "" in names:
        newest[newest == names.tolist().index("")] = -1
    jobs = np.full(index.gpu_count, -1, np.int32)
    held = newest >= 0
    if not held.any():
        return jobs, ()
    used, codes = np.unique(names[newest[held]], return_inverse=True)
    jobs[held] = codes
    return jobs, tuple(map(str, used))
