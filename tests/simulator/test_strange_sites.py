"""Sparse and strange telemetry of healthy fleets, made by a stranger's generator: nothing healthy is accused.

Each site is a case of generator A without a fault; where a site needs more (counters that reset, a clock that steps),
its rows are changed as that site would write them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from drover_cli.case.read import read_case
from drover_collector.engine.replay import Replay
from drover_collector.policy.policy import Policy
from drover_core.model.events import Incident, RecommendedAction, Severity
from drover_simulator.strangers import a

Change = Callable[[Path], None]
# The generator's nodes lose telemetry for up to two and a half minutes now and then. That is said, and never a drain.
SEED = 301
SAID = {"silent", "no_telemetry"}
COUNTERS = ("energy_j", "throttle_power_us", "throttle_thermal_sw_us", "pcie_replays", "ecc_dram_corrected")


def rows_of(folder: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    for name in ("gpu", "node"):
        path = folder / f"{name}.parquet"
        if path.exists():
            pq.write_table(change(pq.read_table(path)), path)


def fleet_of(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "fleet.json"
    fleet = json.loads(path.read_text())
    change(fleet)
    path.write_text(json.dumps(fleet))


def first_node(folder: Path) -> str:
    return str(json.loads((folder / "fleet.json").read_text())["nodes"][0]["name"])


def middle(table: pa.Table) -> Any:
    first, last = (pc.min_max(table["ts"])[bound].as_py() for bound in ("min", "max"))
    return first + (last - first) / 2


def no_jobs(folder: Path) -> None:
    fleet_of(folder, lambda fleet: fleet.update(jobs=[]))


def no_labels(folder: Path) -> None:
    """Nobody says which rack, leaf, pool or board a node is of, or which job runs."""

    def bare(fleet: dict[str, Any]) -> None:
        fleet["jobs"] = []
        for node in fleet["nodes"]:
            for key in ("rack", "leaf", "pool", "sku"):
                node.pop(key, None)

    fleet_of(folder, bare)


def one_gpu(folder: Path) -> None:
    node = first_node(folder)

    def alone(fleet: dict[str, Any]) -> None:
        fleet["nodes"] = [node_ | {"gpus": 1, "links": []} for node_ in fleet["nodes"] if node_["name"] == node]
        fleet["jobs"] = []

    fleet_of(folder, alone)
    for name in ("events", "inventory"):
        path = folder / f"{name}.jsonl"
        kept = [row for row in path.read_text().splitlines() if json.loads(row)["node"] == node]
        kept = [row for row in kept if not json.loads(row).get("gpu")]
        path.write_text("".join(row + "\n" for row in kept))
    (folder / "link.parquet").unlink(missing_ok=True)

    def rows(table: pa.Table) -> pa.Table:
        table = table.filter(pc.equal(table["node"], node))
        return table.filter(pc.equal(table["gpu"], 0)) if "gpu" in table.column_names else table

    rows_of(folder, rows)


def counters_reset(folder: Path) -> None:
    """The driver of one node was loaded again: its counters begin at 0."""
    node = first_node(folder)

    def rows(table: pa.Table) -> pa.Table:
        at = middle(table)
        again = pc.and_(pc.equal(table["node"], node), pc.greater(table["ts"], pa.scalar(at, table["ts"].type)))
        for name in set(COUNTERS) & set(table.column_names):
            before = pc.max(table[name].filter(pc.invert(again))).as_py() or 0.0
            number = table.column_names.index(name)
            rest = pc.max_element_wise(pc.subtract(table[name], before), 0.0)
            table = table.set_column(number, name, pc.if_else(again, rest, table[name]))
        return table

    rows_of(folder, rows)


def clock_steps(folder: Path) -> None:
    """One node's clock is set back by three seconds, as a first step of NTP does."""
    node = first_node(folder)

    def rows(table: pa.Table) -> pa.Table:
        at = pa.scalar(middle(table), table["ts"].type)
        later = pc.and_(pc.equal(table["node"], node), pc.greater(table["ts"], at))
        back = pc.subtract(table["ts"], pa.scalar(timedelta(seconds=3)))
        moved = table.set_column(
            table.column_names.index("ts"), "ts", pc.if_else(later, back.cast(table["ts"].type), table["ts"])
        )
        return moved.sort_by("ts")

    rows_of(folder, rows)


def agent_restarts(folder: Path) -> None:
    """One node's agent is updated three times, each time away for 20 s."""
    node, times = first_node(folder), []

    def rows(table: pa.Table) -> pa.Table:
        first = pc.min(table["ts"]).as_py()
        for minute in (20, 30, 40):
            low, high = first + timedelta(minutes=minute), first + timedelta(minutes=minute, seconds=20)
            away = pc.and_(pc.equal(table["node"], node), pc.greater(table["ts"], pa.scalar(low, table["ts"].type)))
            away = pc.and_(away, pc.less(table["ts"], pa.scalar(high, table["ts"].type)))
            table = table.filter(pc.invert(away))
            times.append(high)
        return table

    rows_of(folder, rows)
    started = [
        {"ts": at.isoformat(), "node": node, "gpu": None, "kind": "lifecycle", "code": "agent_started",
         "message": "agent started"}
        for at in sorted(set(times))
    ]  # fmt: skip
    path = folder / "events.jsonl"
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in started))


def driver_upgrade(folder: Path) -> None:
    """The fleet's driver is upgraded node by node, ten minutes apart."""
    path = folder / "inventory.jsonl"
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    table = pq.read_table(folder / "gpu.parquet")
    first = pc.min(table["ts"]).as_py()
    for number, name in enumerate(sorted({row["node"] for row in rows})):
        at = first + timedelta(minutes=20 + 10 * number)
        rows.append({"ts": at.isoformat(), "node": name, "inventory": {"driver_version": "580.95.05"}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# What NVML and GPM do not answer of a GPU in MIG mode as a whole: its instances are read instead.
OF_INSTANCES = (
    "gpu_util_ratio", "memory_util_ratio", "sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio",
    "dram_active_ratio", "fp16_active_ratio", "fp32_active_ratio", "fp64_active_ratio", "compute_processes",
)  # fmt: skip


def mig(folder: Path) -> None:
    """One node's GPUs are in MIG mode, two instances each; jobs hold instances, and no whole GPU."""
    node = first_node(folder)
    instances: list[pa.Table] = []

    def rows(table: pa.Table) -> pa.Table:
        mine = pc.equal(table["node"], node)
        if "gpu" in table.column_names:
            part = table.filter(mine)
            for number in range(2):
                named = pc.binary_join_element_wise(part["gpu"].cast(pa.string()), f"MIG-{number}", "/")
                instances.append(part.drop_columns(["gpu"]).append_column("instance", named))
            for name in set(OF_INSTANCES) & set(table.column_names):
                nothing = pa.scalar(None, table[name].type)
                table = table.set_column(table.column_names.index(name), name, pc.if_else(mine, nothing, table[name]))
        return table

    rows_of(folder, rows)
    pq.write_table(pa.concat_tables(instances), folder / "mig.parquet")

    def freed(fleet: dict[str, Any]) -> None:
        for job in fleet["jobs"]:
            job["members"] = [member for member in job["members"] if member[0] != node]

    fleet_of(folder, freed)


def mixed_boards(folder: Path) -> None:
    """Two kinds of boards stand side by side, in the same racks and with other columns."""
    other = folder.with_name("other")
    here = json.loads((folder / "fleet.json").read_text())
    skus = {node["sku"] for node in here["nodes"]}
    for seed in range(SEED + 1, SEED + 20):
        a.write_case(other, seed, nodes=4, hours=1.2, interval_s=10.0, healthy=True)
        fleet = json.loads((other / "fleet.json").read_text())
        if not skus & {node["sku"] for node in fleet["nodes"]}:
            break
    else:
        raise AssertionError("all seeds draw the same boards")
    start, others = (pc.min(pq.read_table(case / "gpu.parquet")["ts"]).as_py() for case in (folder, other))
    for name in ("gpu", "node", "link"):
        paths = [case / f"{name}.parquet" for case in (folder, other)]
        if not all(path.exists() for path in paths):
            continue
        first, second = (pq.read_table(path) for path in paths)
        moved = pc.add(second["ts"], pa.scalar(start - others)).cast(first["ts"].type)
        second = second.set_column(second.column_names.index("ts"), "ts", moved)
        second = second.set_column(
            second.column_names.index("node"), "node", pc.binary_join_element_wise("b", second["node"], "-")
        )
        pq.write_table(pa.concat_tables([first, second], promote_options="permissive"), paths[0])

    def both(mine: dict[str, Any]) -> None:
        mine["nodes"] += [node | {"name": f"b-{node['name']}"} for node in fleet["nodes"]]

    fleet_of(folder, both)


@dataclass(frozen=True)
class Site:
    name: str
    nodes: int = 4
    hours: float = 1.2
    interval_s: float = 10.0
    change: Change = lambda _folder: None


SITES = (
    Site("each second", nodes=2, hours=0.4, interval_s=1.0),
    Site("each 60 s", interval_s=60.0, hours=2.0),
    Site("one GPU", change=one_gpu),
    Site("one node", nodes=1),
    Site("two nodes", nodes=2),
    Site("no jobs", change=no_jobs),
    Site("no labels", change=no_labels),
    Site("counters that reset", change=counters_reset),
    Site("a clock that steps", change=clock_steps),
    Site("agents that restart", change=agent_restarts),
    Site("a driver's upgrade", change=driver_upgrade),
    Site("MIG", change=mig),
    Site("mixed boards", change=mixed_boards),
)


def warnings_of(folder: Path) -> list[Incident]:
    case = read_case(folder)
    replay = Replay(case.index, case.buckets(), case.events, Policy.named("nvidia"), case.inventories)
    incidents: dict[str, Incident] = {}
    for outcome in replay:
        incidents.update((i.id, i) for i in outcome.incidents)
    assert replay.engine is not None and not replay.engine.errors
    return [i for i in incidents.values() if i.severity in (Severity.WARNING, Severity.CRITICAL)]


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_a_healthy_site_is_accused_of_nothing(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "case"
    a.write_case(folder, SEED, nodes=site.nodes, hours=site.hours, interval_s=site.interval_s, healthy=True)
    site.change(folder)
    found = warnings_of(folder)
    assert not [(i.kind, i.cause, i.summary) for i in found if i.cause not in SAID]
    assert not [i.summary for i in found if i.action in (RecommendedAction.DRAIN, RecommendedAction.ISOLATE)]
