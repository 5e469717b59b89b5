# ruff: noqa: N802  # the methods of fleet.proto
"""Ten collectors of 12,500 nodes each, played from answers that were made once: what a console asks, nothing behind it.

A cluster's fleet is its own: other nodes are sick, two of them have nodes of the same names. Run as a module, it
serves until it is ended and prints one JSON line: the addresses. Acts are written to `--acts`, with the cluster that
got them.

    python -m console.replayed --clusters 10 --nodes 12500 [--acts FILE]
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import signal
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from drover_core.model.events import Health, Incident, IncidentKind, RecommendedAction, Severity, to_json
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server

GPUS, PER_RACK = 8, 16
LEGEND = [health.value for health in Health]
SICK = 40  # nodes of a cluster with a GPU that an incident is about
MODES = ("observe", "approve", "enforce")


class Replayed(FleetServicer):
    """The answers of one collector."""

    def __init__(self, number: int, nodes: int, acts: Path | None) -> None:
        self.name, self._acts = f"c{number:02d}", acts
        chance = random.Random(number)
        names = [f"r{n // PER_RACK + 1:03d}n{n % PER_RACK + 1:02d}" for n in range(nodes)]
        racks = [names[at : at + PER_RACK] for at in range(0, nodes, PER_RACK)]
        rows = [pb.Rack(name=r[0][:4], nodes=[pb.RackNode(name=n, gpus=GPUS) for n in r]) for r in racks]
        self._layout = pb.Layout(version="1", racks=rows)
        sick = chance.sample(range(nodes), min(SICK, nodes // 2))
        cells = bytearray([LEGEND.index(Health.HEALTHY)]) * (nodes * GPUS)
        now_ms = time.time_ns() // 1_000_000
        self._incidents, self._nodes = [], {}
        for place, node in enumerate(sick):
            fatal, gpu = place % 8 == 0, chance.randrange(GPUS)
            health = Health.CONFIRMED if fatal else Health.SUSPECT
            cells[node * GPUS + gpu] = LEGEND.index(health)
            self._nodes[names[node]] = health.value
            self._incidents.append(_incident(self.name, names[node], gpu, fatal, now_ms - place * 60_000))
        self._names, self._cells = names, bytes(cells)
        counts = {word: self._cells.count(place) for place, word in enumerate(LEGEND)}
        self._status = pb.Status(
            fleet=f"{self.name} hall", mode=MODES[number % 3], nodes_expected=nodes, nodes_reporting=nodes,
            gpus_expected=nodes * GPUS, gpus_by_health=counts, role="active", receivers=1, pending=int(number % 3 == 1),
            open_incidents_by_severity={
                s.value: sum(i.severity is s for i in self._incidents) for s in Severity
            },
        )  # fmt: skip

    def GetStatus(self, _request: Any, _context: Any) -> pb.Status:
        now_ms = time.time_ns() // 1_000_000
        status = pb.Status()
        status.CopyFrom(self._status)
        status.ts_ms = status.newest_sample_ms = status.newest_tick_ms = now_ms
        return status

    def GetLayout(self, _request: Any, _context: Any) -> pb.Layout:
        return self._layout

    def GetPicture(self, request: pb.PictureRequest, _context: Any) -> pb.Picture:
        padded = self._cells + bytes(-len(self._cells) % 4)
        picture = pb.Picture(
            layout_version="1", ts_ms=time.time_ns() // 1_000_000, legend=LEGEND, gpus=len(self._cells)
        )
        if request.packed:
            picture.frame = gzip.compress(padded, 1)
        else:
            picture.cells = self._cells
        return picture

    def ListIncidents(self, request: Any, _context: Any) -> pb.IncidentList:
        shown = self._incidents[: request.limit or None]
        return pb.IncidentList(incidents_json=[to_json(i) for i in shown], total=len(self._incidents))

    def ListNodes(self, request: Any, _context: Any) -> pb.NodeList:
        found = [name for name in self._names if request.contains in name]
        found.sort(key=lambda name: (name not in self._nodes, name))
        rows = [
            pb.NodeRow(name=n, rack=n[:4], health=self._nodes.get(n, "healthy"), gpu_health=["healthy"] * GPUS)
            for n in found[: request.limit or None]
        ]
        return pb.NodeList(nodes=rows, total=len(found))

    def ListJobs(self, request: Any, _context: Any) -> pb.JobList:
        since_ms = self._incidents[-1].since_ms if self._incidents else 0
        rows = []
        for rack in self._layout.racks:
            hurt = next((node.name for node in rack.nodes if node.name in self._nodes), "")
            job = pb.JobRow(job=f"job-{rack.name}", gpus=GPUS * len(rack.nodes), nodes=len(rack.nodes))
            job.since_ms = since_ms or time.time_ns() // 1_000_000 - 3_600_000
            if hurt:
                job.severity, job.hurt = "warning", f"a GPU of node {hurt} is slow"
            rows.append(job)
        rows.sort(key=lambda job: not job.severity)
        return pb.JobList(
            jobs=rows[: request.limit or None], total=len(rows), hurt=sum(bool(job.severity) for job in rows)
        )

    def Search(self, request: pb.SearchRequest, _context: Any) -> pb.SearchReply:
        found = [name for name in self._names if request.text in name]
        hits = [
            pb.SearchHit(kind="node", name=n, node=n, state=self._nodes.get(n, "healthy"))
            for n in found[: request.limit]
        ]
        return pb.SearchReply(hits=hits, more=len(found) > len(hits))

    def GetNode(self, request: pb.NodeRequest, context: Any) -> pb.NodeDetail:
        if request.node not in self._names:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no node {request.node!r} in the fleet")
        row = pb.NodeRow(name=request.node, rack=request.node[:4], health=self._nodes.get(request.node, "healthy"))
        return pb.NodeDetail(row=row, gpus=[pb.GpuDetail(gpu=slot, health="healthy") for slot in range(GPUS)])

    def PreviewAct(self, _request: Any, _context: Any) -> pb.ActPreview:
        return pb.ActPreview(may_act=True)

    def ActOnNode(self, request: pb.ActRequest, _context: Any) -> pb.ActReply:
        if self._acts is not None:
            with self._acts.open("a") as file:
                file.write(json.dumps([self.name, request.act, request.node, request.why]) + "\n")
        return pb.ActReply(state="done", detail=f"by {self.name}")


def _incident(cluster: str, node: str, gpu: int, fatal: bool, since_ms: int) -> Incident:
    what = "fell off the bus" if fatal else "runs at 71 % of its peers' clock"
    return Incident(
        f"{cluster}{node}", IncidentKind.XID if fatal else IncidentKind.STRAGGLER, "xid_79" if fatal else "power_cap",
        "gpu", node, gpu, ((node, gpu),), since_ms, since_ms, None, Severity.CRITICAL if fatal else Severity.WARNING,
        0.95, RecommendedAction.DRAIN if fatal else RecommendedAction.PROBE, f"GPU {gpu} of {node} {what}", "", (),
        (), ("xid",),
    )  # fmt: skip


def serve(number: int, nodes: int, acts: Path | None) -> tuple[grpc.Server, str]:
    """Return the server of a collector, which runs, and its address."""
    replayed = Replayed(number, nodes, acts)  # type: ignore[abstract]  # a method that it lacks answers UNIMPLEMENTED
    options = [("grpc.so_reuseport", 0), ("grpc.max_send_message_length", 64 << 20)]
    server = grpc.server(futures.ThreadPoolExecutor(4), options=options)
    add_FleetServicer_to_server(replayed, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=12_500)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--acts", type=Path)
    given = parser.parse_args()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, lambda *_: ended.set())
    kept: list[Any] = []
    addresses = {}
    for number in range(given.first, given.first + given.clusters):
        made = serve(number, given.nodes, given.acts)
        kept.append(made[0])
        addresses[f"c{number:02d}"] = made[1]
    print(json.dumps(addresses), flush=True)
    ended.wait()


if __name__ == "__main__":
    main()
