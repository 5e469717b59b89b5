"""A reading each second under load, as test data: serials and UUIDs made up."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from drover_agent.sources.nvml.source import NvmlSource
from drover_core.metrics.catalog import Scope, of_scope
from gpu import common


def record(path: Path, torch: Any, seconds: int) -> dict[str, Any]:
    ended = threading.Event()
    load = threading.Thread(target=_load, args=(torch, ended)) if not isinstance(torch, str) else None
    source = NvmlSource("gpu-node")
    ticks: list[dict[str, Any]] = []
    inventory: dict[str, str] = {}
    if load:
        load.start()
    try:
        for now_ms in common.each_second(seconds):
            reading = source.read(now_ms)
            inventory |= reading.inventory
            ticks.append({
                "ts_ms": now_ms,
                "rows": [{"gpu": e.gpu, "mig": e.mig, "values": dict(v)} for e, v in reading.rows],
                "absent": [[e.gpu, e.mig, name, why] for e, name, why in reading.absent],
                "events": [dataclasses.asdict(event) for event in reading.events],
            })  # fmt: skip
    finally:
        ended.set()
        if load:
            load.join()
        source.close()
    identity = re.compile(r"\.(serial|uuid)$")
    inventory = {key: f"made-up-{key}" if identity.search(key) else value for key, value in inventory.items()}
    path.write_text(json.dumps({"inventory": inventory, "under_load": bool(load), "ticks": ticks}))
    trouble = trouble_of(json.loads(path.read_text()))
    return {"file": str(path), "ticks": len(ticks), "trouble": trouble[:20], "holds": bool(ticks) and not trouble}


def _load(torch: Any, ended: threading.Event) -> None:
    a = torch.randn(common.SIZE, common.SIZE, device="cuda", dtype=torch.bfloat16)
    while not ended.is_set():
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        ended.wait(0.2)


def trouble_of(recorded: dict[str, Any]) -> list[str]:
    """What is wrong with a recording: values beyond the catalog's ranges, metrics that are neither there nor absent,
    counters that fall."""
    catalog = {metric.name: metric for metric in of_scope(Scope.GPU)}
    reported: dict[tuple[int, str], set[str]] = defaultdict(set)
    counts: dict[tuple[int, str, str], float] = {}
    found = []
    for tick in recorded["ticks"]:
        for row in tick["rows"]:
            who = row["gpu"], row["mig"]
            reported[who] |= row["values"].keys()
            for name, value in row["values"].items():
                metric = catalog.get(name)
                if metric is None or not metric.low <= value <= metric.high:
                    found.append(f"{tick['ts_ms']}: {name} of GPU {who} is {value}")
                elif metric.kind == "counter":
                    if value < counts.get((*who, name), value):
                        found.append(f"{tick['ts_ms']}: {name} of GPU {who} fell to {value}")
                    counts[*who, name] = value
        for gpu, mig, name, _ in tick["absent"]:
            reported[gpu, mig].add(name)
    readers = {name for name, metric in catalog.items() if metric.sources.keys() & {"nvml", "gpm"}}
    found += [
        f"GPU {who}: nothing is said of {name}"
        for who, names in reported.items()
        if not who[1]
        for name in sorted(readers - names)
    ]
    return found
