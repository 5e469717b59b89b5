"""A case into a store, out of its collector, into another store, through a backup: the same files, byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from drover_proto import fleet_pb2 as pb
from testbed.system_processes import Collector, collector

SINCE, UNTIL = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
FILES = (
    "fleet.json", "gpu.parquet", "node.parquet", "link.parquet", "workload.parquet", "events.jsonl", "absences.jsonl",
    "inventory.jsonl",
)  # fmt: skip


def drover(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "drover_cli.main", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def toml(case: Path) -> str:
    """The fleet of a case as a collector reads it."""
    lines = []
    for node in json.loads((case / "fleet.json").read_text())["nodes"]:
        links = [
            "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in link.items() if value is not None) + "}"
            for link in node.pop("links", [])
        ]
        node["names"] = node.pop("name")
        lines.append("[[nodes]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in node.items()]
        lines += [f"links = [{', '.join(links)}]"] if links else []
    return "\n".join(lines) + "\n"


def settings(folder: Path) -> str:
    return f'retention_days = 3650\nbackup_folder = "{folder}/backups"'


def export(site: Collector, case: Path) -> dict[str, bytes]:
    done = json.loads(drover("export", case, "--since", SINCE, "--until", UNTIL, "--collector", site.api, "--json"))
    assert done["files"] == {path.name: path.stat().st_size for path in case.iterdir()}, "sizes are those on the disk"
    return {name: (case / name).read_bytes() for name in FILES if (case / name).exists()}


def site_of(folder: Path, case: Path) -> Path:
    """A collector's folder with the case in its store."""
    folder.mkdir()
    done = json.loads(drover("import", case, "--url", f"chdb://{folder}/store", "--json"))
    assert done["rows"] > 0
    return folder


def test_a_case_survives_stores_and_a_backup(tmp_path: Path) -> None:
    given = tmp_path / "given"
    drover("simulate", "--out", given, "--nodes", 3, "--hours", 0.1, "--seed", 3)
    fleet = toml(given)
    node = json.loads((given / "fleet.json").read_text())["nodes"][0]["name"]
    times = pq.read_table(given / "node.parquet")["ts"][:5]
    steps = {"ts": times, "node": [node] * 5, "workload": ["pretrain"] * 5, "step_time_s": [0.5, 0.25, 0.5, 1.0, 0.5]}
    pq.write_table(pa.table(steps), given / "workload.parquet")
    inventory = {
        "ts": "2025-12-30T12:00:00.000Z",
        "node": node,
        "inventory": {"driver_version": "570", "gpu0.vbios": "1"},
    }
    (given / "inventory.jsonl").write_text(json.dumps(inventory) + "\n")
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    site_of(first, given)
    with collector(first, fleet, settings(first)) as site:
        exported = export(site, tmp_path / "exported")
    site_of(second, tmp_path / "exported")
    with collector(second, fleet, settings(second)) as site:
        again = export(site, tmp_path / "again")
        stored = site.stub.GetStatus(pb.StatusRequest(), timeout=120).samples_stored
        backup = json.loads(drover("backup", "b1", "--collector", site.api, "--json"))
        refused = subprocess.run(
            [sys.executable, "-m", "drover_cli.main", "backup", "../b2", "--collector", site.api],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
    assert exported.keys() == again.keys() == set(FILES)
    for name, data in exported.items():
        assert again[name] == data, name
    assert json.loads(exported["inventory.jsonl"]) == inventory
    assert len(exported["events.jsonl"].splitlines()) == len((given / "events.jsonl").read_text().splitlines()) > 0
    assert (refused.returncode, "no name for a backup" in refused.stderr) == (2, True)
    assert Path(backup["path"]) == second / "backups" / "b1"
    third.mkdir()
    drover("restore", backup["path"], "--url", f"chdb://{third}/store")
    with collector(third, fleet, settings(third)) as site:
        assert export(site, tmp_path / "restored") == again
        assert site.stub.GetStatus(pb.StatusRequest(), timeout=120).samples_stored == stored > 0
