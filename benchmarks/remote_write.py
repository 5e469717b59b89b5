"""Prometheus remote write and our own blocks out of the same values, as templates whose times and values are replaced.

A template spares the sender nearly all work, so that it does not starve the servers that are measured next to it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import cramjam
import numpy as np
import numpy.typing as npt

from drover_core.metrics.catalog import Metric
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import schema_message

Floats = npt.NDArray[np.float64]

TIME_BYTES = 6  # of a varint that holds milliseconds since 1970, from 2004 to 2109
SCHEMA = 1


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def series_labels(metric: Metric, node: str, gpu: int, model: str) -> bytes:
    """The labels of one series as dcgm-exporter and a scraper give them, encoded, sorted as remote write asks."""
    labels = {
        "DCGM_FI_DRIVER_VERSION": "550.90.07",
        "Hostname": node,
        "UUID": f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}/{gpu}')}",
        "__name__": f"DCGM_FI_DEV_{metric.name.upper()}",
        "device": f"nvidia{gpu}",
        "gpu": str(gpu),
        "instance": f"{node}:9400",
        "job": "dcgm-exporter",
        "modelName": model,
        "pci_bus_id": f"00000000:{0x1B + gpu:02X}:00.0",
    }
    return b"".join(field(1, field(1, k.encode()) + field(2, v.encode())) for k, v in sorted(labels.items()))


class RemoteWrite:
    """The WriteRequest of one agent.

    Prometheus and vmagent (`populateTimeSeries` in queue_manager.go, `copyTimeSeries` in pendingseries.go) send a
    TimeSeries of one sample for each sample, its labels with it, in the order of the scrapes. The protocol allows
    several samples under their labels once, and some senders use it (Telegraf's serializer, OpenTelemetry's exporter).

    Args:
        labels: of each series, encoded.
        grouped: samples under each set of labels; 1: as Prometheus and vmagent send.
    """

    def __init__(self, labels: Sequence[bytes], grouped: int = 1) -> None:
        sample = field(2, b"\x09" + bytes(8) + b"\x10" + bytes(TIME_BYTES))
        request = bytearray()
        starts = []
        for encoded in labels:
            one = encoded + sample * grouped
            request += varint(1 << 3 | 2) + varint(len(one))
            starts.append(len(request) + len(encoded))
            request += one
        self._grouped = grouped
        self._bytes = np.frombuffer(request, np.uint8).copy()
        each = np.array(starts)[:, None] + np.arange(grouped) * len(sample)  # [series, samples]
        self._values = (each + 3)[:, :, None] + np.arange(8)
        self._times = (each + 12)[:, :, None] + np.arange(TIME_BYTES)

    def request(self, ts_ms: Sequence[int], values: Floats) -> bytes:
        """
        Args:
            ts_ms: [ticks], as many as are grouped or a multiple of that; values: float64 [series, ticks].
        """
        parts = []
        for first in range(0, len(ts_ms), self._grouped):  # fields that repeat may follow in as many messages
            now = slice(first, first + self._grouped)
            times = np.frombuffer(b"".join(varint(ts) for ts in ts_ms[now]), np.uint8).reshape(-1, TIME_BYTES)
            self._bytes[self._times] = times
            own = np.ascontiguousarray(values[:, now])
            self._bytes[self._values] = own.view(np.uint8).reshape(*own.shape, 8)
            parts.append(self._bytes.tobytes())
        return b"".join(parts)

    def message(self, ts_ms: Sequence[int], values: Floats) -> bytes:
        """The body of a POST; see `request`."""
        return bytes(cramjam.snappy.compress_raw(self.request(ts_ms, values)))


class Blocks:
    """Rows of a whole fleet in the stored form, ready to be cut into the batches of single agents.

    Attributes:
        rows: structured [ticks, entities], as a block's body has them; the time is put in when a batch is cut.
        presence: uint8 [entities, bytes].
        values: float64 [ticks, entities, metrics]: what `rows` say, in units of the catalog.
    """

    def __init__(self, metrics: Sequence[Metric], ticks: int, per_agent: int, present: npt.NDArray[np.bool_]) -> None:
        self.metrics, self._per_agent = metrics, per_agent
        layout = [("ts", "<i8"), ("entity", "<u2"), *((m.name, f"<{m.type}") for m in metrics)]
        self.rows = np.zeros((ticks, len(present)), np.dtype(layout))
        self.rows["entity"] = np.arange(len(present)) % per_agent + 1
        self.presence = np.packbits(present, axis=1, bitorder="little")
        self.values = np.zeros((ticks, len(present), len(metrics)))
        self._present = present

    def put(self, tick: int, columns: Sequence[Floats]) -> None:
        """One tick's values [entities] of each metric, none absent where `present` is set."""
        for number, (metric, column) in enumerate(zip(self.metrics, columns, strict=True)):
            filled = np.where(self._present[:, number], column, 0.0)
            self.rows[metric.name][tick] = stored = np.rint(filled / metric.step) if metric.step else filled
            self.values[tick, :, number] = stored * metric.step if metric.step else stored

    def batch(self, agent: int, seq: int, first: int, ts_ms: Sequence[int]) -> bytes:
        """The AgentMessage with ticks `first` and on of one agent."""
        own = slice(agent * self._per_agent, (agent + 1) * self._per_agent)
        rows = self.rows[first : first + len(ts_ms), own].copy()
        rows["ts"] = np.array(ts_ms)[:, None]
        presence = np.tile(self.presence[own], (len(ts_ms), 1))
        block = pb.Block(schema=SCHEMA, rows=rows.size, presence=presence.tobytes(), body=rows.tobytes())
        batch = pb.Batch(lane=pb.LIVE, seq=seq, blocks=[block])
        return pb.AgentMessage(batch=batch).SerializeToString()

    def hello(self, node: str, spool: str, ts_ms: int, model: str) -> bytes:
        message = pb.Hello(
            node=node, boot_id=spool, spool_id=spool, protocol=1, agent_version="bench", ts_ms=ts_ms, interval_ms=1000
        )
        message.entities.add(index=0, scope=pb.NODE, key=node)
        for slot in range(self._per_agent):
            key = f"S-{node}-{slot}"
            message.entities.add(index=slot + 1, scope=pb.GPU, key=key, gpu=slot, serial=key, model=model)
        message.schemas.append(schema_message(SCHEMA, pb.GPU, self.metrics))
        return pb.AgentMessage(hello=message).SerializeToString()
