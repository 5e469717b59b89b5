"""A case as other tools make it: ports in link.parquet, and a fleet.json that lists none of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from drover_cli.case.read import read_case
from drover_collector.engine.replay import Replay
from drover_collector.policy.policy import Policy
from drover_core.model.events import Incident, RecommendedAction, Severity
from drover_core.times import iso

START = 1_767_225_600_000
SECONDS, STEP = 1800, 10
NODES = [f"n{n}" for n in range(6)]
PORTS = [f"mlx5_{k}" for k in range(4)]


def case_of(folder: Path, **more: str) -> Path:
    """Half an hour of six nodes. From minute 10 on n2/mlx5_1 flaps and n4/mlx5_3 collects 15 symbol errors a second."""
    folder.mkdir()
    nodes = [{"name": name, "gpus": 4} for name in NODES]
    (folder / "fleet.json").write_text(json.dumps({"nodes": nodes, "jobs": []}))
    times = range(0, SECONDS, STEP)

    def write(name: str, rows: Iterable[dict[str, object]]) -> None:
        table = pa.Table.from_pylist(list(rows))
        ts = pa.array([START + 1000 * int(t) for t in table["ts"].to_pylist()], pa.timestamp("ms", "UTC"))
        pq.write_table(table.set_column(0, "ts", ts), folder / name)

    write(
        "gpu.parquet",
        ({"ts": t, "node": n, "gpu": g, "power_w": 400.0} for t in times for n in NODES for g in range(4)),
    )
    write("node.parquet", ({"ts": t, "node": n, "cpu_util_ratio": 0.3} for t in times for n in NODES))
    write("link.parquet", (_port(t, n, p) for t in times for n in NODES for p in PORTS))
    for name, text in more.items():
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def _port(t: int, node: str, name: str) -> dict[str, object]:
    since = max(0, t - 600)
    flaps = node == "n2" and name == "mlx5_1"
    errs = node == "n4" and name == "mlx5_3"
    return {
        "ts": t, "node": node, "link": name, "link_up": float(not (flaps and since and since % 120 < 20)),
        "link_downed": 3.0 + flaps * (since // 120), "symbol_errors": 15.0 * since * errs, "rate_gbps": 400.0,
    }  # fmt: skip


def found(folder: Path) -> dict[str, Incident]:
    case = read_case(folder)
    run = Replay(case.index, case.buckets(), case.events, Policy.load(), case.inventories)
    for _ in run:
        pass
    assert run.engine is not None
    assert run.engine.errors == {}
    return {f"{i.node} {i.cause}": i for i in run.engine.incidents.values()}


def test_faults_of_ports_are_found_although_fleet_json_lists_none(tmp_path: Path) -> None:
    incidents = found(case_of(tmp_path / "c"))
    assert set(incidents) == {"n2 port_flaps", "n4 port_errors"}
    assert {i.severity for i in incidents.values()} == {Severity.WARNING}, "which GPU they serve is not known"


def test_what_an_agent_said_of_its_pci_bus_counts_too(tmp_path: Path) -> None:
    facts = {f"gpu{slot}.nic": f"mlx5_{slot}" for slot in range(4)}
    lines = "".join(json.dumps({"ts": iso(START), "node": name, "inventory": facts}) + "\n" for name in NODES)
    incidents = found(case_of(tmp_path / "c", inventory=lines))
    assert (incidents["n2 port_flaps"].severity, incidents["n2 port_flaps"].asked) == (
        Severity.CRITICAL,
        RecommendedAction.DRAIN,
    )
