"""Case folders: what can be used is used, what cannot is named, and what is broken is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drover_cli.case.read import Case, CaseError, read_case
from drover_cli.case.write import NewFolder, ParquetWriter
from drover_core.metrics.catalog import Scope
from drover_core.model.events import EventKind

START = 1_767_225_600_000


def write(path: Path, table: dict[str, Any], **fleet: Any) -> Path:
    path.mkdir(exist_ok=True)
    nodes = [{"name": "n1", "gpus": 2}, {"name": "n2", "gpus": 2}]
    (path / "fleet.json").write_text(json.dumps({"nodes": nodes, "jobs": [], **fleet}))
    pq.write_table(pa.table(table), path / "gpu.parquet")
    return path


def rows(*given: tuple[int, str, int, float | None]) -> dict[str, Any]:
    ts, node, gpu, power = zip(*given, strict=True)
    return {
        "ts": pa.array([START + t for t in ts], pa.timestamp("ms", "UTC")),
        "node": list(node),
        "gpu": pa.array(gpu, pa.uint8()),
        "power_w": pa.array(power, pa.float64()),
    }


def power(case: Case) -> list[list[float | None]]:
    found = [b.gpu["power_w"] for b in case.buckets()]
    return [[None if np.isnan(v) else round(float(v), 1) for v in values] for values in found]


def test_rows_become_buckets(tmp_path: Path) -> None:
    given = rows(
        (0, "n1", 0, 100), (5000, "n1", 0, 300), (6000, "n1", 0, 200), (0, "n2", 1, None), (21_000, "n2", 1, 50)
    )
    case = read_case(write(tmp_path / "c", given))
    buckets = list(case.buckets())
    assert power(case) == [[200.0, None, None, None], [None] * 4, [None, None, None, 50.0]]
    assert [list(b.gpu_rows) for b in buckets] == [[3, 0, 0, 1], [0] * 4, [0, 0, 0, 1]]
    assert [list(b.node_rows) for b in buckets] == [[3, 1], [0, 0], [0, 1]]
    assert [b.start_ms for b in buckets] == [START, START + 10_000, START + 20_000]


def test_late_and_repeated_rows_land_once_where_they_belong(tmp_path: Path) -> None:
    given = rows((10_000, "n1", 0, 5), (0, "n1", 0, 1), (0, "n1", 0, 1), (10_000, "n1", 0, 5))
    case = read_case(write(tmp_path / "c", given))
    assert power(case) == [[1.0, None, None, None], [5.0, None, None, None]]
    assert [int(b.gpu_rows[0]) for b in case.buckets()] == [1, 1]
    assert any("out of time order" in note for note in case.notes)


def test_row_groups_make_no_difference(tmp_path: Path) -> None:
    """Late rows, row groups of three rows, and hosts that report nothing in the last hour."""
    given = [(10_000 * k, "n1", g, k + 0.5 * g) for k in range(430) for g in range(2) if (k + g) % 7]
    late = sorted(given, key=lambda row: row[0] + 200_000 * (row[3] % 5 == 0))
    path = write(tmp_path / "c", rows(*late))
    table = pq.read_table(path / "gpu.parquet")
    pq.write_table(table, path / "gpu.parquet", row_group_size=3)
    hosts = {"ts": table.column("ts")[20:0:-1], "node": ["n1"] * 20, "cpu_util_ratio": [0.5] * 20}
    pq.write_table(pa.table(hosts), path / "node.parquet", row_group_size=3)
    case = read_case(path)
    known = {(t, g): v for t, _, g, v in given}
    assert power(case) == [[*(known.get((10_000 * k, g)) for g in range(2)), None, None] for k in range(430)]
    ratios = [bucket.node["cpu_util_ratio"] for bucket in case.buckets()]
    assert np.nansum(ratios) == pytest.approx(0.5 * len(set(hosts["ts"].to_pylist())))
    assert np.isnan(ratios[-100:]).all()


def test_slow_case_has_longer_buckets(tmp_path: Path) -> None:
    given = rows(*((i * 30_000, "n1", 0, 100.0 + i) for i in range(5)))
    case = read_case(write(tmp_path / "c", given))
    assert case.bucket_ms == 30_000
    assert [r[0] for r in power(case)] == [100.0, 101.0, 102.0, 103.0, 104.0]


def test_what_cannot_be_used_is_reported(tmp_path: Path) -> None:
    given = rows((0, "n1", 0, 100), (0, "n1", 7, 100), (0, "n9", 0, 100), (1000, "n1", 0, -5.0), (2000, "n1", 0, 1e9))
    path = write(tmp_path / "c", {**given, "volts": [1.0] * 5})
    case = read_case(path)
    assert power(case) == [[100.0, None, None, None]]
    notes = "\n".join(case.notes)
    for said in (
        "2 rows of things fleet.json does not list", "volts", "2 values of power_w outside",
        "catalog columns are missing", "node.parquet is missing", "events.jsonl is missing",
    ):  # fmt: skip
        assert said in notes


def test_jobs_hold_gpus_in_their_time(tmp_path: Path) -> None:
    job = {"id": "812", "start": START + 10_000, "end": START + 20_000, "members": [["n1", 1], ["n2", 0]]}
    given = rows(*((i * 10_000, "n1", 0, 1.0) for i in range(3)))
    case = read_case(write(tmp_path / "c", given, jobs=[job]))
    assert [list(b.jobs) for b in case.buckets()] == [[-1] * 4, [-1, 0, 0, -1], [-1] * 4]
    assert next(case.buckets()).job_names == ("812",)


def test_links_are_those_that_the_fleet_lists_and_then_those_that_have_rows(tmp_path: Path) -> None:
    nodes = [{"name": "n1", "gpus": 2}, {"name": "n2", "gpus": 2, "links": [{"link": "mlx5_0"}, {"link": "mlx5_1"}]}]
    path = write(tmp_path / "c", rows((0, "n1", 0, 1.0)), nodes=nodes)
    names = ["mlx5_1", "mlx5_0", "mlx5_10", "mlx5_2", "mlx5_0"]
    links = {"ts": [START] * 5, "node": ["n2", "n2", "n1", "n1", "n9"], "link": names}
    pq.write_table(pa.table({**links, "rate_gbps": [200.0, 400.0, 100.0, 50.0, 10.0]}), path / "link.parquet")
    case = read_case(path)
    assert [list(b.link["rate_gbps"]) for b in case.buckets()] == [[400.0, 200.0, 50.0, 100.0]]
    assert any("link.parquet: 1 rows of things fleet.json does not list" in note for note in case.notes)


def test_events_are_read_in_time_order(tmp_path: Path) -> None:
    path = write(tmp_path / "c", rows((0, "n1", 0, 1.0)))
    (path / "events.jsonl").write_text(
        '{"ts": "2026-01-01T00:00:09Z", "node": "n2", "gpu": null, "kind": "kernel", "code": "oom", "message": "x"}\n\n'
        f'{{"ts": {START}, "node": "n1", "gpu": 1, "kind": "xid", "code": 79, "message": "off the bus"}}\n'
        '{"ts": 0, "node": "n9", "gpu": 1, "kind": "xid", "code": 79, "message": ""}\n'
    )
    case = read_case(path)
    assert [(e.ts_ms - START, e.node, e.gpu, e.kind, e.code) for e in case.events] == [
        (0, "n1", 1, EventKind.XID, "79"),
        (9000, "n2", None, EventKind.KERNEL, "oom"),
    ]
    assert any("1 events of nodes" in note for note in case.notes)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("fleet.json", "{", "not valid JSON"),
        ("gpu.parquet", "junk", "not a readable Parquet"),
        ("events.jsonl", "{", "line 1: not valid JSON"),
        ("events.jsonl", "[]", "line 1: expected a JSON object"),
        ("events.jsonl", '{"ts": 1}', "line 1: expected"),
        ("events.jsonl", '{"ts": "x", "node": "n1", "kind": "xid"}', "line 1"),
        ("events.jsonl", '{"ts": 1, "node": "n1", "kind": "gossip"}', "gossip"),
    ],
)
def test_broken_case_is_one_clear_line(tmp_path: Path, file: str, content: str, said: str) -> None:
    path = write(tmp_path / "c", rows((0, "n1", 0, 1.0)))
    (path / file).write_text(content)
    with pytest.raises(CaseError) as error:
        read_case(path)
    assert said in str(error.value) and file in str(error.value) and "\n" not in str(error.value)


def test_a_column_that_cannot_be_read_is_one_clear_line_when_it_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "c", rows(*((i * 1000, "n1", 0, float(i)) for i in range(100))))
    chunk = pq.ParquetFile(path / "gpu.parquet").metadata.row_group(0)
    (at,) = [chunk.column(i) for i in range(chunk.num_columns) if chunk.column(i).path_in_schema == "power_w"]
    content = bytearray((path / "gpu.parquet").read_bytes())
    start = min(offset for offset in (at.dictionary_page_offset, at.data_page_offset) if offset)
    content[start : start + at.total_compressed_size] = bytes(at.total_compressed_size)
    (path / "gpu.parquet").write_bytes(content)
    case = read_case(path)
    with pytest.raises(CaseError, match=r"gpu\.parquet: not a readable Parquet file") as error:
        power(case)
    assert "\n" not in str(error.value)


def test_a_folder_that_may_not_be_looked_at_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(CaseError, match="Permission denied; choose a folder"):
        read_case(tmp_path / "case")


def test_broken_columns(tmp_path: Path) -> None:
    given = rows((0, "n1", 0, 1.0))
    with pytest.raises(CaseError, match="'node' is missing"):
        read_case(write(tmp_path / "a", {k: v for k, v in given.items() if k != "node"}))
    with pytest.raises(CaseError, match="must be a timestamp"):
        read_case(write(tmp_path / "b", {**given, "ts": ["soon"]}))
    with pytest.raises(CaseError, match="'power_w' is string"):
        read_case(write(tmp_path / "c", {**given, "power_w": ["much"]}))
    with pytest.raises(CaseError, match="no such folder"):
        read_case(tmp_path / "none")
    with pytest.raises(CaseError, match="have no ts"):
        read_case(write(tmp_path / "d", {**given, "ts": pa.array([None], pa.timestamp("ms"))}))
    hours = rows((0, "n1", 0, 1.0), (3_600_000, "n1", 0, 1.0))
    with pytest.raises(CaseError, match="10 min"):
        read_case(write(tmp_path / "e", hours))


def test_written_columns_come_back(tmp_path: Path) -> None:
    writer = ParquetWriter(tmp_path / "gpu.parquet", Scope.GPU)
    keys = {"ts": np.array([START, START]), "node": ["n1", "n2"], "gpu": np.array([0, 1])}
    writer.write(keys, {"power_w": np.array([412.34, np.nan]), "pcie_replays": np.array([np.nan, 7.0])})
    writer.close()
    table = pq.read_table(tmp_path / "gpu.parquet")
    assert table.column("power_w").to_pylist() == [pytest.approx(412.3), None]
    assert table.column("pcie_replays").to_pylist() == [None, 7]
    assert table.column("sm_clock_mhz").null_count == 2


def test_half_written_case_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="nothing was kept"), NewFolder(tmp_path / "c") as folder:
        (folder / "fleet.json").write_text("{}")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
    with NewFolder(tmp_path / "c") as folder:
        (folder / "fleet.json").write_text("{}")
    with pytest.raises(CaseError, match="exists"), NewFolder(tmp_path / "c"):
        pass
