"""Ports that a case has rows of and its fleet.json does not list: a collector stores what agents tell of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from drover_proto.fleet import FleetSpec, LinkSpec


def with_ports(spec: FleetSpec, path: Path) -> FleetSpec:
    """The fleet with the ports of a link.parquet. A file that cannot be read is told by who reads its samples."""
    try:
        rows = pq.ParquetFile(path).read(columns=["node", "link"])
    except (OSError, pa.ArrowInvalid):
        return spec
    found: dict[str, set[str]] = {}
    for row in rows.group_by(["node", "link"]).aggregate([]).to_pylist():
        if row["link"] is not None:
            found.setdefault(str(row["node"]), set()).add(str(row["link"]))
    nodes = []
    for node in spec.nodes:
        new = sorted(found.get(node.name, set()) - {link.link for link in node.links})
        nodes.append(replace(node, links=(*node.links, *map(LinkSpec, new))))
    return replace(spec, nodes=tuple(nodes))
