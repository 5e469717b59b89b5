"""What `bench_cpu` sends to VictoriaMetrics: the same samples in either form, each with its own value and time."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import cramjam
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from remote_write import RemoteWrite, series_labels  # noqa: E402  # it lies next to the other scripts

from drover_core.metrics.catalog import Scope, of_scope  # noqa: E402  # the same

METRICS = of_scope(Scope.GPU)[:3]
LABELS = [series_labels(metric, node, 0, "H100") for node in ("n1", "node-22") for metric in METRICS]
TS_MS = [1_790_000_000_000 + 1000 * tick for tick in range(4)]
VALUES = np.arange(24.0).reshape(6, 4) + 0.25


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """A protobuf message, read by nothing of what wrote it."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        size = {0: 0, 1: 8, 2: -1}[key & 7]
        if size == 0:
            yield key >> 3, varint()
            continue
        if size < 0:
            size = varint()
        yield key >> 3, data[at : at + size]
        at += size


def series_of(body: bytes) -> list[tuple[bytes, list[tuple[float, int]]]]:
    """(labels as sent, [(value, time)]) of each TimeSeries."""
    found = []
    for number, one in fields(bytes(cramjam.snappy.decompress_raw(body))):
        assert number == 1
        assert isinstance(one, bytes)
        labels, samples = b"", []
        for inner, content in fields(one):
            assert isinstance(content, bytes)
            if inner == 1:
                labels += b"\x0a" + bytes([len(content)]) + content
            else:
                sample = dict(fields(content))
                (value,) = struct.unpack("<d", sample[1])  # type: ignore[arg-type]  # of wire type 1
                samples.append((value, sample[2]))
        found.append((labels, samples))
    return found  # type: ignore[return-value]  # times are numbers


def test_as_prometheus_and_vmagent_send_each_sample_has_its_labels_scrape_by_scrape() -> None:
    expected = [(LABELS[n], [(VALUES[n, tick], TS_MS[tick])]) for tick in range(4) for n in range(6)]
    assert series_of(RemoteWrite(LABELS).message(TS_MS, VALUES)) == expected


def test_grouped_a_series_has_its_labels_once() -> None:
    expected = [(LABELS[n], [(VALUES[n, tick], TS_MS[tick]) for tick in range(4)]) for n in range(6)]
    assert series_of(RemoteWrite(LABELS, 4).message(TS_MS, VALUES)) == expected


@pytest.mark.parametrize("grouped", [1, 4])
def test_a_message_leaves_nothing_in_the_next(grouped: int) -> None:
    writer = RemoteWrite(LABELS, grouped)
    writer.message(TS_MS, VALUES)
    later = [ts + 60_000 for ts in TS_MS]
    assert writer.message(later, VALUES + 7) == RemoteWrite(LABELS, grouped).message(later, VALUES + 7)
