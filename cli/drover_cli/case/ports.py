"""Ports that a case has rows of and its fleet.json does not list: they are judged like those that it lists."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from drover_collector.fleet.index import FleetIndex
from drover_collector.fleet.ports import name_key


def add_ports(index: FleetIndex, path: Path) -> None:
    """Add the ports of a link.parquet to a fleet. Who reads its samples reports a file that cannot be read."""
    try:
        rows = pq.ParquetFile(path).read(columns=["node", "link"])
    except (OSError, pa.ArrowInvalid):
        return
    pairs = rows.group_by(["node", "link"]).aggregate([]).to_pylist()
    found = {(str(row["node"]), str(row["link"])) for row in pairs if row["node"] and row["link"]}
    index.ports.add(sorted(found, key=lambda pair: (index.node_number.get(pair[0], -1), name_key(pair[1]))))
