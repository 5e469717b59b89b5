"""Inference servers by their Prometheus pages: time to first token, tokens per second, requests running and waiting.

Latencies and token rates come from the growth of histograms and counters between two reads of the page, so the first
read has none, and a window without a request has no latency. What each kind of server calls them stands in
`inference_engines.py`.

One row per server, keyed NODE/NAME; a server that reports several models has one for each, NODE/NAME:MODEL.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.http_page import LIMIT_S, Page, PageError
from drover_agent.sources.workloads.inference_engines import (
    ENGINES,
    TOTALS,
    Engine,
    Series,
)
from drover_core.metrics.catalog import BY_NAME, Absent, Scope
from drover_core.metrics.prometheus_text import ExpositionError, Sample, parse

BUDGET_S = 2.5  # for all pages of one reading: below the sampler's limit of 3 s
SIT_OUT = 3  # readings that a server sits out after one in which it did not answer: it would cost the others their time
MAX_MODELS = 64  # rows of one server
MAX_MODEL = 120  # characters of a model's name in a key: its end, which says more than the folder it lies in
WINDOWS = 3  # a page that was away for more intervals than this begins again: its growth is of another time

NAMES = ("ttft_p50_s", "ttft_p95_s", "tokens_per_s", "requests_running", "requests_waiting")
_LATENCY = ("ttft_p50_s", 0.5), ("ttft_p95_s", 0.95)

_WANTED = frozenset(name for engine in ENGINES for name in engine.names())

Counts = dict[tuple[str, frozenset[tuple[str, str]]], float]  # (name, labels) -> value

_log = logging.getLogger(__name__)


class InferenceSource:
    """All servers of the settings, each read by itself."""

    name = "inference"
    interval_s = 10.0  # the window of its rates: one value per detector bucket

    def __init__(self, node: str, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`urls`: as `urls_trouble` wants them; `clock` in seconds."""
        self._clock = clock
        self.servers = [
            _Server(f"{node}/{name}", name, Page(url)) for name, _, url in (item.partition("=") for item in urls)
        ]

    def read(self, _: int) -> Reading:
        reading = Reading()
        deadline = time.monotonic() + BUDGET_S
        for server in self.servers:
            server.read(reading, self._clock(), self.interval_s, out_of_time=time.monotonic() + LIMIT_S > deadline)
        if self.servers:  # who was last is first next time, should the time not do for all
            self.servers.append(self.servers.pop(0))
        return reading

    def close(self) -> None:
        for server in self.servers:
            server.page.close()


@dataclass(slots=True)
class _Server:
    """One page: its last counts, and the rows that it had."""

    key: str
    name: str
    page: Page
    entities: dict[str, Entity] = field(default_factory=dict)  # model ("" for all) -> its row
    counts: Counts = field(default_factory=dict)
    read_s: float | None = None
    split: bool = False  # several models were seen
    crowded: bool = False  # more models than are reported
    sits_out: int = 0
    trouble: str = ""

    def read(self, reading: Reading, now_s: float, interval_s: float, *, out_of_time: bool) -> None:
        if self.sits_out or out_of_time:
            self.sits_out = max(self.sits_out - 1, 0)
            self._away(reading, Absent.TIMEOUT)
            return
        try:
            found = parse(self.page.read(), _WANTED)
            engine = next((e for e in ENGINES if any(name in found for name in e.names())), None)
            if engine is None:
                raise ExpositionError("the page has no metric of vLLM, SGLang, Triton or TGI")
        except PageError as error:
            self.sits_out = SIT_OUT if error.absent is Absent.TIMEOUT else 0
            self._note(str(error))
            self._away(reading, error.absent)
            return
        except ExpositionError as error:
            self._note(f"{self.page.url}: {error}")
            self._away(reading, Absent.ERROR)
            return
        self._note("")
        since_s = math.inf if self.read_s is None else now_s - self.read_s
        before = self.counts if 0 < since_s <= WINDOWS * interval_s else None
        self.read_s, self.counts = now_s, {}
        self._take(reading, engine, found, before, since_s)

    def _note(self, trouble: str) -> None:
        """Log when a server goes and when it is back."""
        if trouble and not self.trouble:
            _log.warning("inference server %s: %s", self.name, trouble)
        elif self.trouble and not trouble:
            _log.info("inference server %s answers again", self.name)
        self.trouble = trouble

    def _away(self, reading: Reading, why: Absent) -> None:
        for entity in self.entities.values() or (_entity(self.key),):
            reading.absent += [(entity, name, why) for name in NAMES]

    def _take(
        self, reading: Reading, engine: Engine, found: Mapping[str, list[Sample]], before: Counts | None, since_s: float
    ) -> None:
        models = self._by_model(engine, found)
        rows = {model: _entity(f"{self.key}:{_printable(model)}" if model else self.key) for model in models}
        for model, entity in self.entities.items():
            if model not in rows:  # unloaded: reported once, for an absence lasts until there is a value
                reading.absent += [(entity, name, Absent.LOST) for name in NAMES]
        if not self.entities and "" not in rows:  # reported while the server was away and its models not known
            reading.quiet += [(_entity(self.key), name) for name in NAMES]
        self.entities = rows
        for model, entity in rows.items():
            values, absent = self._row(engine, models[model], before, since_s)
            for name, value in values.items():
                if not BY_NAME[name].low <= value <= BY_NAME[name].high:
                    absent[name] = Absent.OUT_OF_RANGE
            reading.rows.append((entity, {n: v for n, v in values.items() if n not in absent}))
            reading.absent += [(entity, name, why) for name, why in absent.items()]
            # A server that is back is not lost any longer, though nobody may have asked it for anything yet.
            reading.quiet += [(entity, name) for name in NAMES if name not in values and name not in absent]

    def _by_model(self, engine: Engine, found: Mapping[str, list[Sample]]) -> dict[str, dict[str, list[Sample]]]:
        """Model, or "" for all of the server -> the samples of each name."""
        models: dict[str, dict[str, list[Sample]]] = {}
        for name in set(engine.names()) & found.keys():
            for sample in found[name]:
                labels = sample[0]
                if not any(key in labels and labels[key] not in total for key, total in TOTALS.items()):
                    models.setdefault(labels.get(engine.model, ""), {}).setdefault(name, []).append(sample)
        self.split |= engine.per_model or len(models) > 1
        if not self.split:
            return {"": next(iter(models.values()), {})}
        if len(models) > MAX_MODELS and not self.crowded:
            self.crowded = True
            _log.warning("inference server %s: %d models; %d are reported", self.name, len(models), MAX_MODELS)
        return {model: models[model] for model in sorted(models)[:MAX_MODELS]}

    def _row(
        self, engine: Engine, found: Mapping[str, list[Sample]], before: Counts | None, since_s: float
    ) -> tuple[dict[str, float], dict[str, Absent]]:
        """The values of one model, and why others are missing; what needs a window or a request is in neither."""
        values: dict[str, float] = {}
        absent: dict[str, Absent] = {}
        for name, choices in (("requests_running", engine.running), ("requests_waiting", engine.waiting)):
            if (got := _first(choices, found)) is None:
                absent[name] = Absent.UNSUPPORTED
            else:
                values[name] = sum(value for _, value in got[1])
        if (got := _first(engine.tokens, found)) is None:
            absent["tokens_per_s"] = Absent.UNSUPPORTED
        elif (grown := self._grown(got, before)) is not None:
            values["tokens_per_s"] = sum(growth for _, growth in grown) / since_s
        if (got := _first(engine.ttft, found)) is None:
            absent |= {name: Absent.UNSUPPORTED for name, _ in _LATENCY}
        elif (grown := self._grown(got, before)) is not None:
            buckets: dict[float, float] = {}
            for labels, growth in grown:
                try:
                    bound = float(labels.get("le", "")) * got[0].scale
                except ValueError:
                    continue
                buckets[bound] = buckets.get(bound, 0.0) + growth
            for name, share in _LATENCY:
                value = quantile(share, buckets)
                if value is not None:
                    values[name] = value
        return values, absent

    def _grown(self, got: tuple[Series, list[Sample]], before: Counts | None) -> list[Sample] | None:
        """By how much each counter grew since the last page, `before`; None without one.

        As Prometheus' `increase`: one that is less than before began again, and all that it has is new. So is all that
        one has which was not there before, for the page was read then.
        """
        grown = []
        for labels, value in got[1]:
            key = got[0].name, frozenset(labels.items())
            self.counts[key] = value
            if before is not None:
                last = before.get(key, 0.0)
                grown.append((labels, value - last if value >= last else value))
        return None if before is None else grown


def quantile(share: float, buckets: Mapping[float, float]) -> float | None:
    """The quantile of a histogram with cumulative counts by upper bound; None when nothing was counted.

    As Prometheus' `histogram_quantile` (https://prometheus.io/docs/prometheus/latest/querying/functions/): linear
    within a bucket, the lowest begins at 0, and of what lies above the highest bound that bound is reported.
    """
    bounds = sorted(buckets)
    if len(bounds) < 2 or bounds[-1] != math.inf or not all(map(math.isfinite, buckets.values())):
        return None
    counts: list[float] = []
    for bound in bounds:  # read while it changes, a page may count less in a higher bucket
        counts.append(max(buckets[bound], counts[-1] if counts else 0.0))
    if counts[-1] <= 0:
        return None
    rank = share * counts[-1]
    at = next(i for i, count in enumerate(counts) if count >= rank)
    if at == len(bounds) - 1:
        return bounds[-2]
    low, below = (bounds[at - 1], counts[at - 1]) if at else (0.0, 0.0)
    if at == 0 and bounds[0] <= 0:
        return bounds[0]
    return low + (bounds[at] - low) * (rank - below) / (counts[at] - below)


def _first(choices: tuple[Series, ...], found: Mapping[str, list[Sample]]) -> tuple[Series, list[Sample]] | None:
    """The first of these series that is there, and its samples."""
    for series in choices:
        samples = found.get(series.name, [])
        if series.only:
            samples = [s for s in samples if all(s[0].get(key) == value for key, value in series.only)]
        if samples:
            return series, samples
    return None


def _printable(model: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in model[-MAX_MODEL:])


def _entity(key: str) -> Entity:
    """Absences name a workload by `link`, so that two of one node are distinct."""
    return Entity(Scope.WORKLOAD, key, link=key.partition("/")[2])
