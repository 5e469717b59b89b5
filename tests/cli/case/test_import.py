"""A case into a store and out of it again: the same rows, however often it goes in."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drover_cli.case.read import CaseError, read_case
from drover_cli.case.store_import import (
    holdings_of,
    load,
    read_absences,
    read_instances,
)
from drover_cli.case.write import INSTANCE, ParquetWriter
from drover_cli.main import main
from drover_collector.api.export import absence_row, jobs_of
from drover_collector.fleet.buckets import Workloads
from drover_collector.store import EntityRow, SampleBatch, Store, StoreError, entity_id
from drover_core.metrics.catalog import Scope
from drover_core.model.fleet import FleetSpec, JobSpec
from drover_core.model.reports import event_report
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

KEYS = {"gpu": ["ts", "node", "gpu"], "node": ["ts", "node"], "link": ["ts", "node", "link"],
        "workload": ["ts", "node", "workload"]}  # fmt: skip
ABSENCES = [
    {"node": "node001", "gpu": 1, "metric": "power_w", "reason": "lost", "from": "2026-01-01T00:00:10.000Z",
     "to": None},
    {
        "node": "node001", "gpu": None, "metric": "load1", "reason": "error", "from": "2026-01-01T00:00:10.000Z",
        "to": "2026-01-01T00:01:00.000Z", "link": None,
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated case with XIDs and jobs, and with absences."""
    case = tmp_path_factory.mktemp("case") / "case"
    assert main(["simulate", "--out", str(case), "--nodes", "4", "--hours", "0.2", "--seed", "5"]) == 0
    names = [node["name"] for node in json.loads((case / "fleet.json").read_text())["nodes"]]
    rows = [row | {"node": names[0]} for row in ABSENCES]
    (case / "absences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    workloads(case, names[:2])
    inventories = [
        {"ts": f"2026-01-01T00:0{n}:00.000Z", "node": names[0], "inventory": {"driver": str(n)}} for n in (1, 2)
    ]
    (case / "inventory.jsonl").write_text("".join(json.dumps(row) + "\n" for row in inventories))
    return case


def workloads(case: Path, nodes: list[str]) -> None:
    """A training job on these nodes, and a server with two models on the first."""
    things = [*((node, "pretrain") for node in nodes), (nodes[0], "chat:llama/8b"), (nodes[0], "chat:qwen")]
    count, start_ms = 20, int(pq.read_table(case / "node.parquet")["ts"][0].as_py().timestamp() * 1000)
    writer = ParquetWriter(case / "workload.parquet", Scope.WORKLOAD)
    for number, (node, name) in enumerate(things):
        values = np.arange(count) * 0.5 + number
        training = name == "pretrain"
        columns = {"step_time_s": values + 1} if training else {"tokens_per_s": values, "requests_running": values // 1}
        times = start_ms + 1000 * np.arange(count)
        writer.write({"ts": times, "node": [node] * count, "workload": [name] * count}, columns)
    writer.close()


def rows_of(store: Store, case: Path) -> dict[str, Any]:
    """What the store holds of the case's span, as an export gives it."""
    spec = read_case(case).spec
    span = (0, 1 << 42)
    found: dict[str, Any] = {}
    for scope in Scope:
        found[scope] = [row for table in store.export.tables(scope, *span) for row in table.to_pylist()]
    found["events"] = [event_report(event) for event in store.events.read(*span, limit=100_000)]
    found["absences"] = [absence_row(absence) for absence in store.absences.between(*span)]
    found["inventories"] = store.inventories.between(*span)
    nodes = {node.name for node in spec.nodes}
    found["jobs"] = [job for job in jobs_of(store.jobs.holdings(*span)) if job.members[0][0] in nodes]
    return found


def test_what_goes_in_comes_out_and_again_changes_nothing(folder: Path, store: Store) -> None:
    case = read_case(folder)
    done = load(store, case, read_absences(case), lambda _: None)
    first = rows_of(store, folder)
    for scope, keys in KEYS.items():
        if not (folder / f"{scope}.parquet").exists():
            continue
        table = pq.read_table(folder / f"{scope}.parquet").sort_by([(key, "ascending") for key in keys])
        held = first[scope]
        assert len(held) == len(table) > 0
        for name in table.column_names:
            if name == "ts":
                expected = table["ts"].cast(pa.timestamp("ms", "UTC")).to_pylist()
            else:
                expected = table[name].to_pylist()
            got = [row[name] for row in held]
            assert [value is None for value in got] == [value is None for value in expected], name
            if name in ("ts", *KEYS[scope]):
                assert got == expected
            else:  # a case may be finer than the store's resolution, but this one is not
                there = [value for value in expected if value is not None]
                assert [value for value in got if value is not None] == pytest.approx(there, rel=1e-12), name
    assert done["events"] == len(case.events) == len(first["events"])
    assert first["inventories"] == case.inventories
    assert done["inventories"] == len(case.inventories) == 2
    assert first["jobs"] == sorted(case.spec.jobs, key=lambda j: (j.start_ms, j.id))
    assert [(a["metric"], a["gpu"], a["reason"], a["to"]) for a in first["absences"]] == [
        ("load1", None, "error", "2026-01-01T00:01:00.000Z"),
        ("power_w", 1, "lost", None),
    ]
    assert load(store, read_case(folder), read_absences(case), lambda _: None) == done
    assert rows_of(store, folder) == first


def test_detectors_see_the_same_workloads_live_as_in_a_replay(folder: Path, store: Store) -> None:
    """As the bucket closes, after a restart, and in a replay of the case: the same rows, to the last bit."""
    case = read_case(folder)
    load(store, case, read_absences(case), lambda _: None)
    replayed = list(case.buckets())
    first, count = replayed[0].start_ms, len(replayed)
    closing = [store.buckets.read_closing(case.index, bucket.start_ms) for bucket in replayed[:4]]
    restarted = store.buckets.read_past(case.index, first, count)

    def rows(work: Workloads) -> list[tuple[int, str, dict[str, float]]]:
        return [
            (n, name, {m: float(column[at]) for m, column in work.values.items() if not np.isnan(column[at])})
            for at, (n, name) in enumerate(zip(work.node.tolist(), work.name, strict=True))
        ]

    expected = [rows(bucket.work) for bucket in replayed]
    assert [len(found) for found in expected[:3]] == [4, 4, 0]  # 20 s of four workloads
    assert [name for _, name, _ in expected[0]] == ["chat:llama/8b", "chat:qwen", "pretrain", "pretrain"]
    assert expected[0][2][2]["step_time_s"] == 3.0  # the lower median of 1 .. 5.5
    assert [rows(bucket.work) for bucket in closing] == expected[:4]
    assert [rows(bucket.work) for bucket in restarted] == expected


def test_many_workloads_of_a_node_are_bounded() -> None:
    names = [f"w{n:03d}" for n in range(40)]
    node = np.repeat(np.array([1, 0], np.int32), 20)
    work = Workloads.of(node, names, {"step_time_s": np.arange(40.0), "ttft_p50_s": np.full(40, np.nan)})
    assert work.node.tolist() == [0] * 16 + [1] * 16
    assert work.name[:2] == ("w020", "w021")
    assert work.values["step_time_s"][:2].tolist() == [20.0, 21.0]
    assert "ttft_p50_s" not in work.values
    assert len(Workloads.of(np.array([-1], np.int32), ["w"], {})) == 0


def test_mig_instances_come_out_and_in_again(folder: Path, tmp_path: Path, store: Store, store_root: Path) -> None:
    """Those of one GPU by the key of the serial that the store knows; a replay judges the whole GPUs only."""
    case = shutil.copytree(folder, tmp_path / "case")
    node = json.loads((case / "fleet.json").read_text())["nodes"][0]["name"]
    ts = int(pq.read_table(case / "node.parquet")["ts"][0].as_py().timestamp() * 1000) + 1000 * np.arange(3)
    gpu = EntityRow(entity_id(Scope.GPU, "s1"), Scope.GPU, "s1", node, 1, serial="s1", first_ms=int(ts[0]))
    part = replace(gpu, entity_id=entity_id(Scope.GPU, "s1/1g.10gb-0"), mig="1g.10gb-0")
    store.entities.write([gpu, part])
    for row, watts in ((gpu, 300.0), (part, 40.0)):
        ids = np.full(3, row.entity_id, np.uint64)
        store.samples.write(SampleBatch.of_values(Scope.GPU, ids, ts, {"power_w": watts + np.arange(3)}))

    def instances_of(of: Store) -> list[tuple[str, str, float]]:
        tables = of.export.instance_tables(0, 1 << 42)
        return [(row["node"], row["instance"], row["power_w"]) for table in tables for row in table.to_pylist()]

    want = [(node, "1/1g.10gb-0", 40.0 + n) for n in range(3)]
    assert instances_of(store) == want
    assert [row["power_w"] for table in store.export.tables(Scope.GPU, 0, 1 << 42) for row in table.to_pylist()] == [
        300,
        301,
        302,
    ]
    writer = ParquetWriter(case / "mig.parquet", Scope.GPU, INSTANCE)
    for table in store.export.instance_tables(0, 1 << 42):
        writer.write_table(table)
    writer.close()
    read = read_case(case)
    other = Store.open(f"chdb://{store_root}?database=other_mig", retention_days=3650)
    for into in (store, other, other):
        load(into, read, [], lambda _: None, read_instances(read))
        assert instances_of(into) == want
        assert len([row for row in into.entities.of_node(node) if row.mig]) == 1
    other.clients.command("DROP DATABASE other_mig")
    other.close()


def test_ports_that_the_fleet_does_not_list_come_in_too(folder: Path, tmp_path: Path, store: Store) -> None:
    """As of a collector whose fleet.toml lists none, which stores them all the same."""
    case = shutil.copytree(folder, tmp_path / "case")
    fleet = json.loads((case / "fleet.json").read_text())
    for node in fleet["nodes"]:
        node["links"] = node.get("links", [])[:1]
    (case / "fleet.json").write_text(json.dumps(fleet))
    held = pq.read_table(case / "link.parquet").num_rows
    assert held > 0
    load(store, read_case(case, for_store=True), [], lambda _: None)
    assert sum(len(table) for table in store.export.tables(Scope.LINK, 0, 1 << 42)) == held


def test_an_hour_without_samples_comes_in_too(folder: Path, tmp_path: Path, store: Store) -> None:
    """As `drover export` makes it of a time in which every agent was away."""
    case = shutil.copytree(folder, tmp_path / "case")
    for file in case.glob("*.parquet"):
        file.unlink()
    read = read_case(case, for_store=True)
    done = load(store, read, read_absences(read), lambda _: None)
    assert (done["rows"], done["absences"]) == (0, len(ABSENCES))
    assert len(store.events.read(0, 1 << 42, limit=1000)) == done["events"] > 0
    with pytest.raises(CaseError, match="a case needs samples to judge"):
        read_case(case)


def test_an_export_without_samples_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = [pb.ExportChunk(file=name, data=b"{}", last=True) for name in ("fleet.json", "inventory.jsonl")]

    class Stub(FleetStandIn):
        def Export(self, request: pb.ExportRequest) -> list[pb.ExportChunk]:  # gRPC's name
            return sent if request.inventory else []

    Stub().install(monkeypatch)
    assert main(["export", str(tmp_path / "case"), "--since", "1h"]) == 0
    assert "no samples of this time" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "case").iterdir()) == ["fleet.json", "inventory.jsonl"]


def test_events_of_the_last_days_alarm_nobody(folder: Path, store: Store) -> None:
    case = read_case(folder)
    now_ms = time.time_ns() // 1_000_000
    case.events = [replace(event, ts_ms=now_ms, received_ms=None) for event in case.events]
    load(store, case, [], lambda _: None)
    assert len(store.events.read(0, now_ms + 1, limit=1000)) == len(case.events) > 0
    assert store.events.unjudged(now_ms, 1000) == []


def test_jobs_that_follow_at_once_leave_no_gap() -> None:
    members = (("n0", 0),)
    spec = FleetSpec(
        (), (JobSpec("a", 1000, 2000, members), JobSpec("b", 2000, 3000, members), JobSpec("c", 4000, None, members))
    )
    holders = [(held.from_ms, held.job) for held in holdings_of(spec)]
    assert holders == [(1000, "a"), (2000, "b"), (3000, None), (4000, "c")]
    assert jobs_of(holdings_of(spec)) == spec.jobs


def spoil(name: str, text: str) -> Callable[[Path], None]:
    return lambda case: (case / name).write_text(text) and None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spoil("absences.jsonl", '{"node": "n0"}\n'), "absences.jsonl: line 1"),
        (spoil("events.jsonl", "{}\n"), "events.jsonl: line 1"),
        (spoil("gpu.parquet", "x"), "not a readable Parquet file"),
        (spoil("workload.parquet", "x"), "workload.parquet: not a readable Parquet file"),
        (lambda case: (case / "fleet.json").unlink(), "fleet.json"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    folder: Path, tmp_path: Path, change: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = shutil.copytree(folder, tmp_path / "case")
    change(case)
    code = main(["import", str(case), "--url", f"chdb://{tmp_path}/store"])
    error = capsys.readouterr().err
    assert code == 2
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_store_in_use_is_left_alone(
    folder: Path, store: Store, store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(folder), "--url", store_url]) == 2
    assert "open already" in capsys.readouterr().err
    assert store.rollups.totals().samples == 0


def test_a_server_is_asked_with_the_password_of_the_settings_which_nobody_sees(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("geheim\n")
    secret.chmod(0o600)
    config = tmp_path / "collector.toml"
    config.write_text(
        f'[store]\nurl = "clickhouse://u:alt@host/drover"\ncluster = "three"\npassword_file = "{secret}"\n'
    )
    asked: dict[str, Any] = {}

    def refuse(url: str, **words: Any) -> Store:
        asked.update(words)
        raise StoreError("away")

    monkeypatch.setattr(Store, "open", refuse)
    assert main(["import", str(folder), "--config", str(config)]) == 2
    assert (asked["password"], asked["cluster"]) == ("geheim", "three")
    assert (asked["visitor"], asked["retention_days"]) == (True, 30)  # its collectors run meanwhile
    secret.chmod(0o644)
    assert main(["import", str(folder), "--config", str(config)]) == 2
    printed = capsys.readouterr().err
    assert "is open to every user; chmod o=" in printed
    assert main(["restore", str(folder), "--config", str(config)]) == 2
    printed += capsys.readouterr().err
    assert "only an embedded store, chdb:///PATH, can be restored here" in printed
    assert "alt@" not in printed
    assert "geheim" not in printed
