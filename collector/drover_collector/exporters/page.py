"""The fleet's Prometheus pages: every GPU's newest values, under the catalog's names or those of dcgm-exporter.

A page of 100,000 GPUs has hundreds of megabytes. It is made in the thread of the scrape that needs it, in small steps
that leave the interpreter to ingest in between, kept compressed, and shared by all scrapes of an interval.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import add

import numpy as np

from drover_collector.exporters.gpus import SLICE, IdentityReader, LastXids, PerGpu, column_of
from drover_collector.exporters.settings import FleetPageConfig
from drover_collector.fleet.buckets import Bucket, Floats
from drover_core.metrics.series import Series, label_text, series_of

log = logging.getLogger(__name__)

LEVEL = 1  # of compression: lines are alike, and more costs time only
GZIP = 31  # zlib's window bits for a stream in gzip's form
PIECE = 1 << 18  # bytes of a page that are sent at once to a client that takes no gzip
STAMP = "drover_export_bucket_timestamp_seconds"
CUT = "drover_export_series_left_out"

PATHS = {"drover": "/metrics/fleet", "dcgm": "/metrics/dcgm"}


@dataclass(frozen=True, slots=True)
class MadePage:
    """A page, compressed. `pieces` are one gzip stream."""

    pieces: Sequence[bytes]
    made_s: float
    series: int
    left_out: int
    plain_size: int

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))

    def plain(self) -> Iterator[bytes]:
        """Yield the page without compression, a piece at a time."""
        stream = zlib.decompressobj(GZIP)
        for piece in self.pieces:
            waiting = piece
            while waiting:
                if text := stream.decompress(waiting, PIECE):
                    yield text
                waiting = stream.unconsumed_tail
        if rest := stream.flush():
            yield rest


class FleetPage:
    """One page. Its methods are for any thread.

    Args:
        newest: returns the newest bucket; None: nothing was stored lately, and the page has no GPU.
    """

    def __init__(
        self,
        naming: str,
        config: FleetPageConfig,
        newest: Callable[[], Bucket | None],
        identities: IdentityReader,
        xids: LastXids,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._families = series_of(naming, config.metrics)
        self._config, self._newest, self._identities, self._xids = config, newest, identities, xids
        self._monotonic = monotonic
        self._texts = PerGpu(lambda gpu, job: label_text(gpu.labels(naming, job)) + " ")
        self._lock = threading.Lock()
        self._held: MadePage | None = None
        self._logged = 0

    def read(self) -> MadePage:
        """Return the page, at most `interval_s` old. Scrapes at once wait for the same one."""
        with self._lock:
            held = self._held
            if held is None or self._monotonic() - held.made_s >= self._config.interval_s:
                held = self._held = self._make()
            return held

    def _make(self) -> MadePage:
        bucket, made_s = self._newest(), self._monotonic()
        writer = _Writer()
        left_out = series = 0
        if bucket is not None:
            texts = self._texts.of(self._identities.read(bucket))
            for family in self._families:
                values = column_of(family, bucket, self._xids)
                count = 0 if values is None else int(np.count_nonzero(~np.isnan(values)))
                if values is None or not count:
                    continue
                if left_out or series + count > self._config.max_series:
                    left_out += count
                    continue
                series += count
                writer.family(family, texts, values)
            writer.line(_gauge(STAMP, "end of the 10 s whose values these are", bucket.end_ms / 1000))
        writer.line(_gauge(CUT, "series that export.page.max_series leaves out of this page", left_out))
        if left_out and left_out != self._logged:
            log.warning("the fleet's page leaves out %d series; raise export.page.max_series, or list fewer metrics",
                        left_out)  # fmt: skip
        self._logged = left_out
        return MadePage(writer.close(), made_s, series, left_out, writer.size)


def _gauge(name: str, help_: str, value: float) -> str:
    return f"# HELP {name} {help_}\n# TYPE {name} gauge\n{name} {value}\n"


class _Writer:
    def __init__(self) -> None:
        self._stream = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
        self.size = 0  # without compression
        self._pieces: list[bytes] = []

    def line(self, text: str) -> None:
        plain = text.encode()
        self.size += len(plain)
        if piece := self._stream.compress(plain):
            self._pieces.append(piece)

    def family(self, family: Series, texts: Sequence[str], values: Floats) -> None:
        self.line(family.header)
        between = "\n" + family.name
        for first in range(0, len(values), SLICE):
            own = values[first : first + SLICE]
            there = np.flatnonzero(~np.isnan(own))
            if not len(there):
                continue
            labels: Sequence[str] = texts[first : first + SLICE]
            if len(there) < len(own):
                labels, own = [labels[at] for at in there.tolist()], own[there]
            self.line(family.name + between.join(map(add, labels, map(repr, own.tolist()))) + "\n")

    def close(self) -> list[bytes]:
        self._pieces.append(self._stream.flush())
        return self._pieces


def make_pages(
    config: FleetPageConfig, newest: Callable[[], Bucket | None], identities: IdentityReader, xids: LastXids
) -> dict[str, FleetPage]:
    """Return path -> page, of those that the settings ask for."""
    return {PATHS[name]: FleetPage(name, config, newest, identities, xids) for name in dict.fromkeys(config.names)}
