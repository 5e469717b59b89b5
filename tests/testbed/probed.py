"""A store with what probes gave: a fleet of H200 nodes, some of whose GPUs and links are not as they should be.

`python -m testbed.probed STORE_URL FLEET_TOML [NODE ...]` fills a store for a collector that is started on it
afterwards, with results of the nodes named, else of all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from drover_collector.store import ProbeRow, Store
from drover_collector.store.repositories.probes import Key
from drover_core.model.events import (
    ProbeOrder,
    ProbeReason,
    ProbeResult,
    ProbeVerdict,
)
from drover_core.model.fleet import load_toml
from drover_core.model.probe_figures import FIGURES

KEY = Key("NVIDIA H200", "570.124", 700.0, True, 5, 16, None, False, "PowerEdge XE9680")
NODES = {"allreduce": 362.0, "host_memory": 410.0}  # figures of a node and what a healthy one gives
GPUS = {
    "gemm_bf16": 789.0, "gemm_fp8": 1392.0, "hbm_copy": 4302.0, "pcie_h2d": 55.4, "pcie_d2h": 55.1, "launch": 4.2,
    "sdc": 412.0,
}  # fmt: skip
PAIR = 376.0
SPREAD = 0.004
LINKS = {frozenset((2, 5)): 0.5}  # pairs of GPUs whose way is slow, on the second node
HOUR_MS = 3_600_000
SLOW, WRONG, HUNG = 5, 3, 6  # slots on the first three nodes


def order_id(node: str, run: int) -> str:
    return f"p-{node}-{run}"


def results(node: str, number: int, ts_ms: int, run: int = 0, gpus: int = 8) -> Iterator[ProbeResult]:
    """One run of a node. Of the first, GPU 5 is 5 % slow; of the second, one way is at half; of the third, GPU 3
    computes wrongly and GPU 6 was not measured in fp8; of the fourth, GPU 5 declines from run to run."""
    draw = np.random.default_rng([number, run])
    own = np.random.default_rng(number).normal(0, SPREAD, (gpus, len(GPUS)))
    count = 0

    def made(probe: str, gpu: int | None, value: float | None, **more: object) -> ProbeResult:
        nonlocal count
        count += 1
        request = order_id(node, run)
        base = ProbeResult(
            f"{request}/{count}", node, gpu, probe, ts_ms, None, value, FIGURES[probe].unit, request=request,
            spread=0.0031, repeats=41, level="quick", device=KEY.sku,
        )  # fmt: skip
        return replace(base, **more)  # type: ignore[arg-type]  # fields of several types

    for at, (probe, usual) in enumerate(GPUS.items()):
        for gpu in range(gpus):
            value: float | None = usual * float(np.exp(own[gpu, at] + draw.normal(0, 0.001)))
            if (number, gpu, probe) == (0, SLOW, "gemm_bf16"):
                value = usual * 0.95
            if (number, gpu, probe) == (3, SLOW, "hbm_copy"):
                value = usual * (1 - 0.006 * run)
            if probe == "sdc":
                right = (number, gpu) != (2, WRONG)
                text = "15 shapes and types, each the same every time"
                wrong = "fp16 3072: 1 of 31 products differ from the first"
                yield made(probe, gpu, float(round(usual)), ok=right, detail=text if right else wrong, spread=None)
            elif (number, gpu, probe) == (2, HUNG, "gemm_fp8"):
                yield made(probe, gpu, None, detail="not enough memory: CUDA out of memory", spread=None)
            else:
                yield made(probe, gpu, value)
    for gpu in range(gpus):
        for peer in range(gpus):
            if gpu != peer:
                bad = LINKS.get(frozenset((gpu, peer)), 1.0) if number == 1 else 1.0
                yield made("p2p", gpu, PAIR * bad * float(np.exp(draw.normal(0, SPREAD))), peer=peer)
    for probe, usual in NODES.items():
        yield made(probe, None, usual * float(np.exp(draw.normal(0, SPREAD))))
    request = order_id(node, run)
    yield ProbeResult(
        f"{request}/end", node, None, "", ts_ms, None, None, "", "", request, level="quick", end="done", seconds=47.2,
        device=KEY.sku,
    )  # fmt: skip


def fill(store: Store, nodes: Sequence[str], now_ms: int, gpus: int = 8, runs: int = 8) -> None:
    """Results of all nodes but the last; the fourth has `runs` of them, a day apart. Orders in each state."""
    for number, node in enumerate(nodes[:-1]):
        for run in range(runs if number == 3 else 1):
            ts_ms = now_ms - HOUR_MS - ((runs - 1 - run) * 24 * HOUR_MS if number == 3 else 0)
            rows = [
                ProbeRow(r, KEY, "" if r.gpu is None else f"S{number:02d}{r.gpu}", "", ts_ms)
                for r in results(node, number, ts_ms, run, gpus)
            ]
            store.probes.results.write(rows)
    first, second, third, *_ = nodes
    for number, (node, why, state, detail, incident) in enumerate(
        [
            (first, ProbeReason.CONFIRM, "done", "", "i-7c1e"),
            (second, ProbeReason.VALIDATE, "done", "", "i-9a02"),
            (third, ProbeReason.IDLE, "done", "", ""),
            (nodes[-2], ProbeReason.PERSON, "sent", "", ""),
            (nodes[-1], ProbeReason.ADMIT, "failed", "expired: not sent within 900 s, it has no stream", ""),
            (nodes[-1], ProbeReason.ADMIT, "asked", "", ""),
        ]
    ):
        id_ = order_id(node, 0) if number < 3 else f"p-order-{number}"
        open_ = state in ("asked", "sent")
        asked_ms = now_ms - 30_000 - number if open_ else now_ms - HOUR_MS - (10 - number) * 60_000
        asked = ProbeOrder(
            id_, node, (), "quick", (), why, "asked", asked_ms, incident, "ada" if number == 3 else "drover"
        )
        store.probes.orders.write([asked])
        if state != "asked":
            store.probes.orders.write([replace(asked, state="sent", ts_ms=asked_ms + 2000)])
        if state in ("done", "failed"):
            store.probes.orders.write([replace(asked, state=state, ts_ms=asked_ms + 60_000, detail=detail)])
    reported_ms = now_ms - HOUR_MS
    slow = f"GPU {SLOW} of {first}: gemm_bf16 749.6 TFLOP/s, 5.0 % below the 119 boards of its configuration (789 +- 3)"
    link = f"GPU 2 to 5 of {second}: p2p 188.2 GB/s, 50.0 % below: other pairs of both are not slow, so the links are"
    wrong = f"GPU {WRONG} of {third}: sdc gave a wrong answer (fp16 3072: 1 of 31 products differ from the first)"
    for number, (node, gpu, probe, text) in enumerate(
        [(first, SLOW, "gemm_bf16", slow), (second, 2, "p2p", link), (third, WRONG, "sdc", wrong)]
    ):
        why = (ProbeReason.CONFIRM, ProbeReason.VALIDATE, ProbeReason.IDLE)[number]
        id_ = order_id(node, 0)
        of_gpus = [
            ProbeVerdict(
                id_, node, slot, slot != gpu, probe if slot == gpu else "",
                text if slot == gpu else f"GPU {slot} of {node}: all as its configuration gives", reported_ms, why,
            )
            for slot in range(gpus)
        ]  # fmt: skip
        store.probes.verdicts.write([*of_gpus, ProbeVerdict(id_, node, None, False, probe, text, reported_ms, why)])


if __name__ == "__main__":
    opened = Store.open(sys.argv[1])
    try:
        names = sys.argv[3:] or [node.name for node in load_toml(Path(sys.argv[2])).nodes]
        fill(opened, names, time.time_ns() // 1_000_000)
    finally:
        opened.close()
