"""GPUs through dcgm-exporter's metrics page, where it already runs.

Profiling metrics are taken from it, and `Gpus.profiled_elsewhere` says so: NVML's own profiling stays off meanwhile.
Everything else NVML gives fresher: dcgm-exporter reads every 30 s by default (`--collect-interval`), and
repeats its values between. Only where NVML cannot be opened (no permission, a container without driver) all metrics of
the page are taken. Where the settings name no page, one that an ordinary user serves is not taken: any user may listen
at a port that is free, and could switch NVML's profiling off and report false values for the GPUs.

Names, units and labels: dcgm_fields.h of NVIDIA/DCGM; etc/default-counters.csv and
internal/pkg/rendermetrics/render_metrics.go of NVIDIA/dcgm-exporter. The violation times are nanoseconds, as the header
has said since DCGM 3.3 and NVML gives them, though default-counters.csv says microseconds.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from drover_agent.sources.base import RATE_STEP, Entity, NodeEvent, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.http_page import Page, PageError
from drover_agent.sources.kmsg.lines import normal_pci
from drover_agent.sources.listeners import user_listening
from drover_core.metrics.catalog import (
    Absent,
    Metric,
    Scope,
    of_scope,
)
from drover_core.metrics.prometheus_text import ExpositionError, Sample, parse
from drover_core.model.kinds import EventKind
from drover_core.xid.codes import lookup

AUTO_PORT = 9400
AUTO_URL = f"http://127.0.0.1:{AUTO_PORT}/metrics"
RETRY_MS = 60_000  # between looks for a page that is not there
CONNECT_LIMIT_S = 0.5  # to a port of this machine
GRACE_MS = 15_000  # NVML has this long to report its GPUs before the page replaces it
LOST_READS = 2  # failed reads after which NVML may profile again

XID_KEY = "DCGM_FI_DEV_XID_ERRORS"
METRICS: Mapping[str, Metric] = MappingProxyType(
    {m.sources["dcgm"].key: m for m in of_scope(Scope.GPU) if "dcgm" in m.sources}
)
# Names of the same fields in other versions. (DCGM 4.7 also has e.g. DCGM_FI_DEV_GPU_UTIL_RATIO; headers
# disagree whether it is a ratio or percent; dcgm-exporter does not give it.)
_ALIASES = {"DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"}
_WANTED = frozenset({*METRICS, *_ALIASES, XID_KEY})
_PROFILING = "DCGM_FI_PROF_"
_ALL_NAMES = frozenset(m.name for m in METRICS.values())
_PROFILING_NAMES = frozenset(m.name for key, m in METRICS.items() if key.startswith(_PROFILING))

# What DCGM writes where it has no value (dcgm_structs.h, DCGM_FP64_BLANK and DCGM_INT64_BLANK), and why.
_BLANK: Mapping[float, Absent] = MappingProxyType(
    {
        2.0**47 + n: why
        for n, why in enumerate((Absent.ERROR, Absent.UNSUPPORTED, Absent.UNSUPPORTED, Absent.NO_PERMISSION))
    }
)
# DCGM's numbers, in addition to NVML's (dcgm_structs.h, dcgmFabricManagerStatus_t), for a state that it does not know
# and for a driver that has none.
_NO_FABRIC_STATE = (5, 6)
_INT64_BLANK = float(0x7FFFFFFFFFFFFFF0)  # its four kinds are one number as a double

_log = logging.getLogger(__name__)


def _somebody_listens() -> bool:
    """On most nodes nobody does, and who it is takes a look at each of perhaps thousands of sockets."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.settimeout(CONNECT_LIMIT_S)
        return trial.connect_ex(("127.0.0.1", AUTO_PORT)) != errno.ECONNREFUSED


class DcgmSource:
    """Reads rows of the GPUs on the page; nothing while there is no page."""

    name = "dcgm"
    interval_s = 10.0  # one value per detector bucket

    def __init__(self, node: str, url: str, gpus: Gpus, kmsg: Path | None = None, proc: Path = Path("/proc")) -> None:
        """`url`: "auto" looks for the page at its usual place. `kmsg`: the kernel log's device, None where it is not
        read; XIDs are taken from the page only where neither it nor NVML reports them.
        """
        self._node, self._gpus, self._kmsg, self._proc = node, gpus, kmsg, proc
        self._auto = url == "auto"
        self._page = Page(AUTO_URL if self._auto else url)
        self._began_ms: int | None = None
        self._next_try_ms = 0
        self._failed = LOST_READS  # reads in a row; begins as one that is not there
        self._reported: dict[Entity, set[str]] = {}  # what the page gave, and would be absent without it
        self._xids: dict[Entity, int] = {}  # the last XID of each GPU
        self.skipped: Counter[str] = Counter()  # rows of the last page that were left out, by why
        self._logged: set[str] = set()
        self._trouble, self._why = "", Absent.LOST  # of the last read that failed

    def read(self, now_ms: int) -> Reading:
        if self._began_ms is None:
            self._began_ms = now_ms
        if 0 < self._next_try_ms - now_ms <= RETRY_MS:  # more than that: the clock was set back
            return self._without(self._why)
        try:
            if self._auto:
                if not _somebody_listens():  # a program that has just begun to listen is checked first
                    raise PageError(Absent.LOST, f"nobody serves {AUTO_URL}")
                self._refuse_users()
            found = parse(self._page.read(), _WANTED)
            if not found:
                raise ExpositionError(f"{self._page.url} has none of dcgm-exporter's metrics")
        except PageError as error:
            return self._fail(now_ms, error.absent, str(error))
        except ExpositionError as error:
            return self._fail(now_ms, Absent.ERROR, str(error))
        return self._take(now_ms, found)

    def _refuse_users(self) -> None:
        """Before anything is asked.

        Raises:
            PageError: an ordinary user listens where the page is looked for, or it cannot be known who does.
        """
        try:
            user = user_listening(self._proc, AUTO_PORT)
        except OSError as error:
            text = f"it cannot be seen who serves {AUTO_URL} ({error}); if it is to be read, set dcgm_url"
        else:
            if user is None:
                return
            text = f"{AUTO_URL} is served by user {user}, no service, and is not believed; if it is right, set dcgm_url"
        self._page.close()
        if text != self._trouble:
            _log.warning("%s", text)
        raise PageError(Absent.LOST, text)

    def close(self) -> None:
        self._gpus.profiled_elsewhere = False
        self._page.close()

    # ---- without a page

    def _fail(self, now_ms: int, why: Absent, text: str) -> Reading:
        self._failed += 1
        if self._failed == LOST_READS:
            self._profiled(here=False)
            _log.warning("dcgm-exporter is lost: %s", text)
        elif self._failed > LOST_READS:
            if not self._auto and text != self._trouble:
                _log.warning("no metrics from dcgm-exporter: %s", text)
            self._next_try_ms = now_ms + RETRY_MS
        self._trouble, self._why = text, why
        reading = self._without(why)
        if self._failed == LOST_READS:
            reading.inventory = {"dcgm.page": ""}
        return reading

    def _without(self, why: Absent) -> Reading:
        """Report as absent what no other source has now. NVML has its own again when it may profile."""
        reading = Reading()
        if self._failed < LOST_READS or not self._gpus.all():
            reading.absent = [(entity, name, why) for entity, names in self._reported.items() for name in names]
        else:
            self._reported.clear()
        return reading

    def _profiled(self, *, here: bool) -> None:
        if self._gpus.profiled_elsewhere is not here:
            self._gpus.profiled_elsewhere = here
            if here:
                _log.info("profiling metrics come from dcgm-exporter (%s); NVML's stay off", self._page.url)
            else:
                _log.warning("profiling metrics come from dcgm-exporter no longer; NVML may give them")

    # ---- with a page

    def _take(self, now_ms: int, found: Mapping[str, list[Sample]]) -> Reading:
        self._failed, self._trouble, self._next_try_ms = 0, "", 0
        profiled = any(key.startswith(_PROFILING) for key in found)
        self._profiled(here=profiled)
        reading = Reading(inventory={"dcgm.page": self._page.url})
        alone = not self._gpus.all()
        if alone and 0 <= now_ms - (self._began_ms or 0) < GRACE_MS:
            return reading
        names = _ALL_NAMES if alone else _PROFILING_NAMES if profiled else frozenset()
        self.skipped.clear()
        rows: dict[Entity, dict[str, float]] = {}
        absent: dict[Entity, dict[str, Absent]] = {}
        for key, samples in found.items():
            if key == XID_KEY:
                self._take_xids(now_ms, samples, reading, wanted=alone)
                continue
            metric = METRICS[_ALIASES.get(key, key)]
            if metric.name not in names:
                continue
            for labels, raw in samples:
                # One row per pod stands there where pods share a GPU: the same value each time.
                if (entity := self._entity(labels, alone=alone)) is not None:
                    value = _value(metric, raw)
                    if isinstance(value, Absent):
                        absent.setdefault(entity, {})[metric.name] = value
                    else:
                        rows.setdefault(entity, {})[metric.name] = value
        self._reported = {}
        for entity in rows.keys() | absent.keys():
            values, missing = rows.get(entity, {}), absent.get(entity, {})
            if values:
                reading.rows.append((entity, values))
            # What dcgm-exporter is not set to collect has no other source.
            reading.absent += [(entity, n, missing.get(n, Absent.UNSUPPORTED)) for n in sorted(names - values.keys())]
            self._reported[entity] = set(names)
        self._log_skipped()
        return reading

    def _entity(self, labels: Mapping[str, str], *, alone: bool) -> Entity | None:
        """Return the GPU or MIG instance of a row. Return None, and count it, for other or unknown entities."""
        uuid, pci = labels.get("UUID") or labels.get("uuid") or "", labels.get("pci_bus_id", "")
        instance = labels.get("GPU_I_ID", "")
        if not uuid or "nvlink" in labels:
            self.skipped["of switches, links and CPUs"] += 1
            return None
        if not alone:
            entity = self._gpus.find(uuid=uuid) or (self._gpus.find(pci=pci) if pci else None)
            if entity is None:
                self.skipped["of GPUs that NVML does not show"] += 1
            elif instance:
                entity = self._gpus.instance(entity.gpu, int(instance)) if instance.isdecimal() else None
                self.skipped["of MIG instances that NVML does not show"] += entity is None
            return entity
        if instance:  # only NVML knows its UUID, by which it is known everywhere
            self.skipped["of MIG instances"] += 1
            return None
        if not labels.get("gpu", "").isdecimal() or int(labels["gpu"]) > 255:
            self.skipped["without the number of their GPU"] += 1
            return None
        serial = labels.get("DCGM_FI_DEV_SERIAL", "")
        return Entity(
            Scope.GPU,
            serial or uuid,
            int(labels["gpu"]),
            uuid=uuid,
            serial=serial,
            pci=f"{known}.0" if (known := normal_pci(pci)) else "",
            model=labels.get("modelName", ""),
        )

    def _take_xids(self, now_ms: int, samples: list[Sample], reading: Reading, *, wanted: bool) -> None:
        """The field is the last XID, with neither time nor text; the same one again does not show. Better than none."""
        for labels, raw in samples:
            entity = self._entity(labels, alone=True) if wanted else None
            if entity is None or not 0 <= raw < 2**16:
                continue
            code, before = int(raw), self._xids.get(entity)
            self._xids[entity] = code
            if before in (None, code) or code == 0 or self._kernel_log_readable():
                continue
            row = lookup(code)
            text = f"XID {code}: {row.meaning}" if row else f"XID {code}"
            event = NodeEvent(now_ms, entity.gpu, EventKind.XID, str(code), f"{text} (by dcgm-exporter)", self.name)
            reading.events.append(event)

    def _kernel_log_readable(self) -> bool:
        if self._kmsg is None:
            return False
        try:
            os.close(os.open(self._kmsg, os.O_RDONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    def _log_skipped(self) -> None:
        for what, count in self.skipped.items():
            if count and what not in self._logged:
                self._logged.add(what)
                _log.info("dcgm-exporter: %d rows %s are left out", count, what)


def _value(metric: Metric, raw: float) -> float | Absent:
    """Return the value in the catalog's unit and in the resolution that is sent, or why there is none."""
    if why := _BLANK.get(raw):
        return why
    if metric.name == "fabric_state" and raw in _NO_FABRIC_STATE:
        return Absent.UNSUPPORTED
    if not math.isfinite(raw) or raw >= _INT64_BLANK:
        return Absent.ERROR
    value = raw * metric.sources["dcgm"].scale
    if metric.unit == "B/s":
        value = round(value / RATE_STEP) * RATE_STEP
    elif metric.unit == "ratio" and metric.high < value <= metric.high * 1.05:  # two windows that end apart
        value = metric.high
    return value if metric.low <= value <= metric.high else Absent.OUT_OF_RANGE
