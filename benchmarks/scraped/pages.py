"""A simulated fleet as the pages of its exporters on each node, served over HTTP.

A page is the table files read backwards: each row's series, with the fleet's value in the exporter's unit. Each node
has an address of its own in 127.0.0.0/8. A silent node refuses; a driver that hangs lets the GPUs' exporter hang; a
lost GPU has no lines. `python benchmarks/scraped/pages.py --help` serves until it is stopped.

AMD's page has the same fleet's values: no machine with AMD's GPUs was at hand. CRC errors of an NVLink are
drawn as corrected errors of XGMI, XID 74 as an uncorrected one. A GPU with uncorrected errors is not healthy, as the
exporter's default thresholds have it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from drover_collector.fleet.buckets import Floats
from drover_collector.scrape.tables import Row, table
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Event, EventKind
from drover_simulator.faults import load_faults
from drover_simulator.fleet import SimulatedFleet, build_fleet

# etc/default-counters.csv of NVIDIA/dcgm-exporter; the others must be asked for.
DEFAULT = frozenset(
    row.series for row in table("dcgm").rows if row.source.startswith(("etc/default", "etc/dcp"))
) - {r.series for r in table("dcgm").rows if r.series.startswith("DCGM_FI_PROF_")
     and r.series not in ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE")}  # fmt: skip
REFRESH_S = 10.0  # dcgm-exporter's --collect-interval; 30 s by default
HANG_S = 60.0
PORTS = {"full": 19400, "default": 19401, "amd": 19402, "node": 19100}
EXPORTERS = {"full": "dcgm", "default": "dcgm", "amd": "amd"}  # which pages -> the table of the GPUs' exporter
MI2XX = ("gpu_edge_temperature", "gpu_average_package_power")  # series that stand on these boards' pages alone
UNCORRECTED = ("ecc_dram_uncorrected", "ecc_sram_uncorrected")
FATAL_NVLINK = 74  # XID


def address(number: int) -> str:
    return f"127.0.{1 + number // 250}.{1 + number % 250}"


class FleetPages:
    """Renders the newest readings of the fleet."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self.fleet = fleet
        self._xids: dict[tuple[str, int], int] = {}
        self._sums: dict[tuple[str, str], float] = defaultdict(float)
        # Of AMD's page: series -> bytes of each GPU so far; errors of its links that are not corrected.
        self._traffic: dict[str, Floats] = {}
        self._fatal = np.zeros(fleet.hardware.gpus)
        self._stepped_s = 0.0
        self._pages: dict[tuple[str, str], str] = {}

    def step(self, seconds: float) -> list[Event]:
        """Advance the fleet. Return the events since the last step, as its agents would report them."""
        self.fleet.step(seconds)
        events = self.fleet.take_events()
        for event in events:
            if event.kind is EventKind.XID and event.gpu is not None and event.code.isdecimal():
                self._xids[event.node, event.gpu] = int(event.code)
                if int(event.code) == FATAL_NVLINK:
                    number = self.fleet.hardware.names.index(event.node)
                    self._fatal[np.flatnonzero(self.fleet.hardware.gpu_node == number)[event.gpu]] += 1
        columns = self.fleet.node_columns()
        for row in table("node").rows:
            if row.metric is not None and row.how == "rate" and row.metric.name in columns:
                for name, value in zip(self.fleet.hardware.names, columns[row.metric.name], strict=True):
                    self._sums[name, row.series] += 0.0 if math.isnan(value) else float(value) * seconds
        if "cpu_util_ratio" in columns:
            for name, busy in zip(self.fleet.hardware.names, columns["cpu_util_ratio"], strict=True):
                self._sums[name, "idle"] += float(1 - busy) * seconds
                self._sums[name, "user"] += float(busy) * seconds
        self._count_traffic(seconds)
        if self.fleet.now_s - self._stepped_s >= REFRESH_S:
            self._pages = {key: page for key, page in self._pages.items() if key[1] == "node"}
            self._stepped_s = self.fleet.now_s
        return events

    def _count_traffic(self, seconds: float) -> None:
        columns = self.fleet.gpu_columns()
        for row in table("amd").rows:
            if row.how == "rate" and row.metric is not None and row.metric.name in columns:
                moved = np.nan_to_num(columns[row.metric.name]) * seconds
                self._traffic[row.series] = self._traffic.get(row.series, np.zeros_like(moved)) + moved

    def gpus(self, number: int, which: str) -> str:
        """Return the page of a node's GPUs: dcgm-exporter's with all fields or its default ones, or AMD's."""
        name = self.fleet.hardware.names[number]
        key = name, which
        if key not in self._pages:
            self._pages[key] = self._amd(number) if which == "amd" else self._dcgm(number, which)
        return self._pages[key]

    def _amd(self, number: int) -> str:
        columns = dict(self.fleet.gpu_columns())
        counted = [np.nan_to_num(columns[name]) for name in UNCORRECTED if name in columns]
        bad = sum(counted, np.zeros_like(columns["nvlink_crc_errors"]))
        columns["exporter_unhealthy"] = (bad == 0).astype(float)  # its series is 1 where a GPU is healthy
        columns["xgmi_corrected"] = columns["nvlink_crc_errors"]
        columns["xgmi_uncorrected"] = self._fatal
        name, gone = self.fleet.hardware.names[number], self.fleet.unreachable()
        lines: list[str] = []
        for row in table("amd").rows:
            if row.series in MI2XX:
                continue
            more = "".join(f',{key}="{values[0]}"' for key, values in row.labels.items())
            more += ',link_index="0"' if row.how == "rate" else ""
            lines += [f"# HELP {row.series} .", f"# TYPE {row.series} gauge"]
            for slot, g in enumerate(np.flatnonzero(self.fleet.hardware.gpu_node == number).tolist()):
                moved = row.how == "rate"
                value = float(self._traffic[row.series][g]) / row.scale if moved else _there(row, columns, g)
                if not gone[g] and not math.isnan(value):
                    lines.append(f"{row.series}{{{_amd_labels(name, number, slot)}{more}}} {value!r}")
        return "\n".join(lines) + "\n"

    def _dcgm(self, number: int, which: str) -> str:
        hardware, columns = self.fleet.hardware, self.fleet.gpu_columns()
        name, gone = hardware.names[number], self.fleet.unreachable()
        lines: list[str] = []
        gpus = np.flatnonzero(hardware.gpu_node == number).tolist()
        for row in table("dcgm").rows:
            if which == "default" and row.series not in DEFAULT:
                continue
            lines += [f"# HELP {row.series} .", f"# TYPE {row.series} gauge"]
            for slot, g in enumerate(gpus):
                value = float(self._xids.get((name, slot), 0)) if row.metric is None else _there(row, columns, g)
                if not gone[g] and not math.isnan(value):
                    lines.append(f"{row.series}{{{_labels(name, number, slot)}}} {value:.6f}")
        return "\n".join(lines) + "\n"

    def node(self, number: int) -> str:
        """Return node_exporter's page of a node."""
        name, columns = self.fleet.hardware.names[number], self.fleet.node_columns()
        lines = [f'node_cpu_seconds_total{{cpu="0",mode="{m}"}} {self._sums[name, m]:.3f}' for m in ("idle", "user")]
        for row in table("node").rows:
            if row.metric is None or row.how in ("busy_share", "used_share"):
                continue
            labels = '{device="eth0"}' if row.how == "rate" else '{controller="0"}' if "edac" in row.series else ""
            if row.metric.scope is Scope.LINK:
                lines += self._ports(name, row)
            elif row.how == "rate":
                lines.append(f"{row.series}{labels} {self._sums[name, row.series]:.1f}")
            elif not math.isnan(value := _there(row, columns, number)):
                lines.append(f"{row.series}{labels} {value!r}")
        return "\n".join(lines) + "\n"

    def _ports(self, name: str, row: Row) -> list[str]:
        ports, columns = self.fleet.link_columns()
        found = []
        for at, (node, port) in enumerate(ports):
            value = _there(row, columns, at) if node == name else math.nan
            if not math.isnan(value):
                value = (4.0 if value else 1.0) if row.how == "is_active" else value
                found.append(f'{row.series}{{device="{port}",port="1"}} {value!r}')
        return found


def _there(row: Row, columns: Mapping[str, Floats], at: int) -> float:
    """Return the value in the exporter's unit, NaN where there is none."""
    assert row.metric is not None
    column = columns.get(row.metric.name)
    return math.nan if column is None else float(column[at]) / row.scale


def _labels(name: str, number: int, slot: int) -> str:
    return (
        f'gpu="{slot}",UUID="GPU-{number:08x}-0000-0000-0000-{slot:012x}",pci_bus_id="00000000:{16 + slot:02X}:00.0",'
        f'device="nvidia{slot}",modelName="NVIDIA H100 80GB HBM3",Hostname="{name}",DCGM_FI_DRIVER_VERSION="550.90.07"'
    )


def _amd_labels(name: str, number: int, slot: int) -> str:
    return (
        f'card_model="102-G30211-00",gpu_compute_partition_type="spx",gpu_id="{slot}",gpu_partition_id="0",'
        f'hostname="{name}",serial_number="{692251001124 + number}-{slot}"'
    )


class PageServer:
    """One server for all addresses: the address that was asked says the node."""

    def __init__(self, pages: FleetPages) -> None:
        self._pages = pages

    async def serve(self) -> None:
        for which, port in PORTS.items():
            await asyncio.start_server(partial(self._answer, which), "0.0.0.0", port, backlog=4096)

    async def _answer(self, which: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = writer.get_extra_info("sockname")[0].split(".")
        number = (int(host[2]) - 1) * 250 + int(host[3]) - 1
        fleet = self._pages.fleet
        node = number % fleet.hardware.nodes
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if fleet.hardware.names[node] not in fleet.silent_nodes():
                await reader.readuntil(b"\r\n\r\n")
                if which != "node" and fleet.modifiers.hung[node]:
                    await asyncio.sleep(HANG_S)
                text = self._pages.node(node) if which == "node" else self._pages.gpus(node, which)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n" + text.encode())
                await writer.drain()
        writer.close()


async def _run(args: argparse.Namespace) -> None:
    spec = build_fleet(args.nodes, args.seed)
    faults = load_faults(args.faults, spec) if args.faults else []
    fleet = SimulatedFleet(spec, args.seed, faults, time.time_ns() // 1_000_000)
    pages = FleetPages(fleet)
    pages.step(1.0)
    await PageServer(pages).serve()
    print("serving", flush=True)
    began, written = time.monotonic(), 0
    while True:
        await asyncio.sleep(args.step)
        pages.step(max(0.1, time.monotonic() - began - fleet.now_s))
        for label in fleet.labels[written:]:
            with args.labels.open("a") as file:
                file.write(json.dumps(label.to_dict()) + "\n")
        written = len(fleet.labels)
        for fault in fleet.skipped:
            print(f"{fault.kind}/{fault.cause} did not happen", file=sys.stderr, flush=True)
        fleet.skipped.clear()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--faults", type=Path)
    parser.add_argument("--labels", type=Path, default=Path("labels.jsonl"))
    parser.add_argument("--step", type=float, default=5.0)
    asyncio.run(_run(parser.parse_args()))
