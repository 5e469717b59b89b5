"""What agents send, built before the clock runs: blocks of simulated telemetry whose times are set when they leave.

A pool is a loop of PERIOD_S seconds of one simulated fleet of H100 nodes: all GPU rows of the catalog that such a board
has, and the rows of a node. A stream takes its GPUs from one pool and starts somewhere in the loop, so that neighbours
send different values; counters jump back once a period.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_core.metrics.catalog import BY_NAME, Metric, Scope
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import HEADER, schema_message
from drover_simulator.fleet import SimulatedFleet, build_fleet

PERIOD_S = 120
POOL_NODES = 32  # 256 GPUs, all H100
SEED = 1000
T0_MS = 1_760_000_000_000
SCHEMA = {Scope.GPU: 1, Scope.NODE: 2}
SCOPES = {Scope.GPU: pb.GPU, Scope.NODE: pb.NODE}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one scope in order of time and then entity: `per_tick` of them a second.

    Attributes:
        packed: structured [PERIOD_S * per_tick], as a block's body lies; presence: uint8 [rows, bytes].
        present: int64 [PERIOD_S], values that are present in each tick.
    """

    metrics: tuple[Metric, ...]
    per_tick: int
    packed: npt.NDArray[np.void]
    presence: npt.NDArray[np.uint8]
    present: npt.NDArray[np.int64]

    def block(self, scope: Scope, ticks: npt.NDArray[np.int64], first_ms: int) -> pb.Block:
        """The rows of these seconds of the loop, sent as 1 s apart from `first_ms` on."""
        at = (ticks[:, None] * self.per_tick + np.arange(self.per_tick)).ravel()
        body = self.packed[at]
        body["ts"] = np.repeat(first_ms + 1000 * np.arange(len(ticks)), self.per_tick)
        return pb.Block(schema=SCHEMA[scope], rows=len(body), presence=self.presence[at].tobytes(), body=body.tobytes())


class Pool:
    """A loop of telemetry of one node with `gpus` GPUs, and which job holds each of them."""

    def __init__(self, number: int, gpus: int) -> None:
        fleet = SimulatedFleet(build_fleet(POOL_NODES, SEED + number), SEED + number, [], T0_MS)
        columns: dict[Scope, list[dict[str, npt.NDArray[np.float64]]]] = {Scope.GPU: [], Scope.NODE: []}
        for _ in range(PERIOD_S):
            fleet.step(1.0)
            fleet.take_events()
            columns[Scope.GPU].append({n: v[:gpus].copy() for n, v in fleet.gpu_columns().items()})
            columns[Scope.NODE].append({n: v[:1].copy() for n, v in fleet.node_columns().items()})
        self.gpus = gpus
        self.jobs = [fleet.steps.name_of(job) for job in fleet.steps.job_of[:gpus].tolist()]
        self.rows = {
            Scope.GPU: _pack(columns[Scope.GPU], np.arange(1, gpus + 1)),
            Scope.NODE: _pack(columns[Scope.NODE], np.zeros(1, np.int64)),
        }

    def batch(self, start: int, first_ms: int, ticks: int) -> tuple[list[pb.Block], int]:
        """(blocks, values present) of so many seconds, from second `start` of the loop on, sent as from `first_ms`."""
        at = (start + np.arange(ticks)) % PERIOD_S
        values = sum(int(rows.present[at].sum()) for rows in self.rows.values())
        return [rows.block(scope, at, first_ms) for scope, rows in self.rows.items()], values

    def hello(self, node: str, spool: str, now_ms: int) -> pb.Hello:
        """Entity 0 is the node, its GPUs follow by slot."""
        message = pb.Hello(
            node=node, boot_id=f"boot-{node}", spool_id=spool, agent_version="benchmark", protocol=1, ts_ms=now_ms,
            interval_ms=1000, inventory={"driver": "570.172.08", "gpus": str(self.gpus)},
        )  # fmt: skip
        message.entities.add(index=0, scope=pb.NODE, key=node)
        for slot in range(self.gpus):
            serial = f"165{node[-5:]}{slot:05d}"
            message.entities.add(
                index=slot + 1,
                scope=pb.GPU,
                key=serial,
                gpu=slot,
                serial=serial,
                uuid=f"GPU-{node}-{slot:04d}-{serial}",
                pci=f"{slot // 8:04x}:{0x18 + slot % 8:02x}:00.0",
                model="NVIDIA H100 80GB HBM3",
            )
        for scope, rows in self.rows.items():
            message.schemas.append(schema_message(SCHEMA[scope], SCOPES[scope], rows.metrics))
        return message


def _pack(ticks: list[dict[str, npt.NDArray[np.float64]]], entities: npt.NDArray[np.int64]) -> Rows:
    metrics = tuple(sorted((BY_NAME[name] for name in ticks[0]), key=lambda m: m.id))
    codes = HEADER + "".join(metric.type for metric in metrics)
    names = ["ts", "entity", *(f"c{i}" for i in range(len(metrics)))]
    packed = np.zeros(len(ticks) * len(entities), [(n, f"<{code}") for n, code in zip(names, codes, strict=True)])
    packed["entity"] = np.tile(entities, len(ticks))
    mask = np.zeros((len(packed), len(metrics)), np.bool_)
    for number, metric in enumerate(metrics):
        values = np.concatenate([tick[metric.name] for tick in ticks])
        mask[:, number] = (values >= metric.low) & (values <= metric.high)
        stored = values / metric.step if metric.step else values
        stored = np.where(mask[:, number], stored, 0)
        packed[f"c{number}"] = np.rint(stored) if metric.step else stored
    presence = np.packbits(mask, axis=1, bitorder="little")
    present = mask.reshape(len(ticks), -1).sum(axis=1).astype(np.int64)
    return Rows(metrics, len(entities), packed, presence, present)
