"""Fixed thresholds, as DCGM's health watches, gpud and a Prometheus rule file use them, on single GPUs and ports.

Sources: DCGM 4 `DcgmHealthWatch.cpp`, `DcgmGPUHardwareLimits.h` (NVLink replay or recovery: fail; CRC 100/s; PCIe
replays; row remap failure; 512 remapped rows), gpud (hardware slowdown 0.6 events/min over 10 min; port down 4 min;
critical XIDs), Azure (93 degC), Slurm and Prometheus `up == 0` for 5 min. Nothing is tuned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from baselines import Bools, gpu
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Event, EventKind

GRID = (1.0,)
THRESHOLD = 1.0
# gpud marks these critical: the GPU or the node needs a reboot or an inspection.
_CRITICAL = (48, 54, 56, 57, 58, 62, 63, 64, 69, 74, 79, 80, 81, 92, 95, 109, 119, 120, 121, 140, 143, 149)
CRITICAL_XIDS = frozenset(map(str, _CRITICAL))
XID_HOLDS_MS = 600_000
NVLINK_PER_S = {"nvlink_replays": 0.0, "nvlink_recoveries": 0.0, "nvlink_crc_errors": 100.0}
PCIE_REPLAYS_PER_MINUTE = 31.0  # of a Gen5 x16 link; Gen4 16
SLOWDOWN_BITS = 0x08 | 0x40 | 0x80
SLOWDOWNS, SLOWDOWN_MS = 6, 600_000
HOT_C = 93.0
SILENT_MS, PORT_DOWN_MS = 300_000, 240_000
PORT_PER_S = {"symbol_errors": 10.0, "link_error_recoveries": 5 / 60, "rx_errors": 10.0, "tx_discards": 100.0}
PORT_ANY = ("link_downed", "buffer_overruns", "local_integrity_errors", "rnr_nak_retries")


class Baseline:
    def __init__(self, index: FleetIndex, _threshold: float = THRESHOLD) -> None:
        self._index = index
        self._before: Bucket | None = None
        self._xid_ms = np.full(index.gpu_count, -(10**15))
        self._slowdowns: deque[tuple[int, Bools]] = deque()
        self._unheard_ms = np.zeros(index.node_count)
        self._down_ms = np.zeros(len(index.ports))
        self._link_node = np.array([port.node for port in index.ports.all()], np.int64)

    def step(self, bucket: Bucket, events: Sequence[Event]) -> tuple[Bools, Bools]:
        index, count, length_s = self._index, self._index.gpu_count, bucket.length_ms / 1000
        for event in events:
            g = None if event.gpu is None else index.gpu(event.node, event.gpu)
            if event.kind is EventKind.XID and event.code in CRITICAL_XIDS and g is not None:
                self._xid_ms[g] = event.received_ms or event.ts_ms
        gpus = bucket.end_ms - self._xid_ms <= XID_HOLDS_MS
        with np.errstate(invalid="ignore"):
            for flag in ("row_remap_failed", "row_remap_pending", "sram_threshold_exceeded"):
                gpus |= gpu(bucket, flag, count) > 0
            gpus |= gpu(bucket, "remapped_rows_uncorrected", count) >= 512
            gpus |= gpu(bucket, "gpu_temp_c", count) >= HOT_C
            gpus |= gpu(bucket, "thermal_margin_c", count) <= -2
            if self._before is not None:
                for metric, limit in NVLINK_PER_S.items():
                    grown = gpu(bucket, metric, count) - gpu(self._before, metric, count)
                    gpus |= grown / length_s > limit
                grown = gpu(bucket, "pcie_replays", count) - gpu(self._before, "pcie_replays", count)
                gpus |= grown / length_s * 60 > PCIE_REPLAYS_PER_MINUTE
        reasons = np.nan_to_num(gpu(bucket, "clock_event_reasons", count)).astype(np.int64)
        self._slowdowns.append((bucket.end_ms, (reasons & SLOWDOWN_BITS) != 0))
        while self._slowdowns[0][0] <= bucket.end_ms - SLOWDOWN_MS:
            self._slowdowns.popleft()
        gpus |= np.sum([flags for _, flags in self._slowdowns], axis=0) >= SLOWDOWNS
        lost = (bucket.gpu_rows == 0) & (bucket.node_rows > 0)[index.gpu_node]
        gpus |= lost
        self._unheard_ms = np.where(bucket.node_rows > 0, 0, self._unheard_ms + bucket.length_ms)
        nodes = self._unheard_ms >= SILENT_MS
        nodes |= self._ports(bucket, length_s)
        self._before = bucket
        return gpus, nodes

    def _ports(self, bucket: Bucket, length_s: float) -> Bools:
        ports = np.zeros(len(self._down_ms), bool)
        before = self._before
        with np.errstate(invalid="ignore"):
            if "link_up" in bucket.link:
                down = bucket.link["link_up"] == 0
                self._down_ms = np.where(down, self._down_ms + bucket.length_ms, 0)
                ports |= self._down_ms >= PORT_DOWN_MS
            for metric, limit in (*PORT_PER_S.items(), *((name, 0.0) for name in PORT_ANY)):
                if before is not None and metric in bucket.link and metric in before.link:
                    ports |= (bucket.link[metric] - before.link[metric]) / length_s > limit
        nodes = np.zeros(self._index.node_count, bool)
        nodes[self._link_node[ports]] = True
        return nodes
