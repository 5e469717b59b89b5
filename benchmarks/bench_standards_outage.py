"""Cut each real receiver off under load, one after the other: is anything lost, is anything else slowed?

A real collector (mutual TLS, embedded store, detectors on) takes the load of bench_ingest.py and sends all of it at the
same time to a real Prometheus and a real VictoriaMetrics by remote_write, to an OTLP receiver that decodes with
opentelemetry-proto, and its audit lines to a real rsyslog over TCP and to the OTLP receiver as logs. Each receiver in
turn is stopped (the OTLP receiver closes each connection unread), and started again after `--cut` seconds. In the end
what the receivers hold is counted and compared with what the collector counts as sent.

    python benchmarks/bench_standards_outage.py [--gpus 5000] [--cut 600]  # 55 minutes; writes the page
    python benchmarks/bench_standards_outage.py --gpus 500 --cut 30 --baseline 20 --interval 10 --no-write  # 6 minutes

It needs prometheus, victoria-metrics and rsyslogd (tests/system_setup.sh installs them), and prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from page_block import EVIDENCE, ROOT, put, when

sys.path.insert(0, str(ROOT / "tests"))
from load.certificates import Authority
from load.collector import Collector, running
from load.fleet import shape_of
from load.measure import Moment, Plan, loading, look
from standards.receivers import Otlp, Prometheus, Receiver, Rsyslog, VictoriaMetrics

from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub

PAGE = EVIDENCE / "standards.md"
GPUS_PER_STREAM = 250
WARM_S = 45.0  # until buckets are judged and each receiver has had its first request
AUDIT_S = 2.0  # between audit lines
LOOK_S = 2.0
TRIES = 5  # to count while nothing is sent
BACK_S = 300.0  # at most, until what waited has been taken
MIB = 2**20
TITLES = {
    "prometheus": "Prometheus (remote_write)", "victoria": "VictoriaMetrics (remote_write)",
    "otel": "OTLP receiver (metrics and logs)", "siem": "rsyslog (TCP)",
}  # fmt: skip


def settings_of(receivers: Sequence[Receiver], interval_s: float) -> str:
    return "".join(receiver.settings(interval_s) for receiver in receivers)


class Auditor:
    """Makes an audit line every AUDIT_S until it is closed: a silence of a node."""

    def __init__(self, collector: Collector, address: str) -> None:
        key, certificate = Authority.load(collector.folder).issue("operator", "drover://operator/benchmark")
        ca = (collector.folder / "ca.crt").read_bytes()
        self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate))
        self._stub = FleetStub(self._channel)
        self.made = self.failed = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(AUDIT_S):
            ask = pb.SilenceAsk(node=["node00000"], hours=0.02, why=f"outage test {self.made}", who="bench")
            try:
                self._stub.CreateSilence(ask, timeout=20)
                self.made += 1
            except grpc.RpcError:
                self.failed += 1

    def close(self) -> None:
        self._end.set()
        self._thread.join(30)
        self._channel.close()


@dataclass(slots=True)
class Watch:
    """Looks at the collector while a phase lasts."""

    collector: Collector
    generators: Any
    begin_s: float
    moments: list[Moment] = field(default_factory=list)

    def wait(self, seconds: float) -> list[Moment]:
        """Return what was seen within so many seconds."""
        end_s, first = time.monotonic() + seconds, len(self.moments)
        while time.monotonic() < end_s:
            self.look()
            time.sleep(max(0.0, min(LOOK_S, end_s - time.monotonic())))
        return self.moments[first:]

    def look(self) -> Moment:
        self.moments.append(look(self.collector, self.generators, self.begin_s))
        return self.moments[-1]

    def until_empty(self, exporters: Sequence[str], most: dict[str, float]) -> float | None:
        """Return the seconds until no more waits for them than before the cut; None: longer than BACK_S."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < BACK_S:
            page = self.look().page
            if page and all(figure(page, "waiting", name) <= most[name] for name in exporters):
                return round(time.monotonic() - began_s, 1)
            time.sleep(LOOK_S)
        return None


def figure(page: dict[str, float], name: str, exporter: str) -> float:
    return page.get(f'drover_export_{name}{{exporter="{exporter}"}}', 0.0)


def seen(moments: Sequence[Moment], exporters: Sequence[str]) -> dict[str, Any]:
    """Return how ingest, detectors, the API and these exporters were meanwhile."""
    first, last = moments[0], moments[-1]
    lags = sorted(moment.lag_s for moment in moments)
    answers = sorted(moment.status_s for moment in moments)
    pages = [moment.page for moment in moments if moment.page]
    return {
        "cores": round((last.usage.cpu_s - first.usage.cpu_s) / max(last.at_s - first.at_s, 0.1), 3),
        "samples_per_s": round((last.total("acked") - first.total("acked")) / max(last.at_s - first.at_s, 0.1)),
        "ack_median_s": round(lags[len(lags) // 2], 2), "ack_max_s": round(lags[-1], 2),
        "tick_max_s": round(max((m.status.detector_seconds for m in moments if m.status is not None), default=0.0), 2),
        "status_median_ms": round(answers[len(answers) // 2] * 1000),
        "rss_mib": round(max(moment.usage.rss_bytes for moment in moments) / MIB),
        "others_failures": round(sum(
            figure(pages[-1], "failures_total", n) - figure(pages[0], "failures_total", n) for n in exporters
        )) if pages else None,
        "others_waiting_max": round(max((figure(p, "waiting", n) for p in pages for n in exporters), default=0)),
    }  # fmt: skip


def cut(watch: Watch, receivers: Sequence[Receiver], which: Receiver, cut_s: float) -> dict[str, Any]:
    """Take one receiver away for so long, and give it back."""
    others = [name for receiver in receivers if receiver is not which for name in receiver.exporters]
    before = watch.moments[-1].page
    usual = {
        name: max((figure(m.page, "waiting", name) for m in watch.moments[-30:]), default=0.0)
        for name in which.exporters
    }
    failures = sum(figure(before, "failures_total", name) for name in which.exporters)
    which.stop()
    meanwhile = watch.wait(cut_s)
    which.start()
    empty_s = watch.until_empty(which.exporters, usual)
    page = watch.moments[-1].page
    waited = [m.page for m in watch.moments if m.page and m.at_s >= meanwhile[0].at_s]
    return seen(meanwhile, others) | {
        "tried_again": round(sum(figure(page, "failures_total", name) for name in which.exporters) - failures),
        "waited_max": round(max(sum(figure(p, "waiting", n) for n in which.exporters) for p in waited)),
        "waited_mib": round(max(sum(figure(p, "waiting_bytes", n) for n in which.exporters) for p in waited) / MIB, 1),
        "caught_up_s": empty_s,
    }  # fmt: skip


def balanced(receivers: Sequence[Receiver], watch: Watch) -> dict[str, Any]:
    """Count on both sides while nothing is sent, between two intervals.

    The load goes on: a GPU that falls silent ends its series with a marker, which is sent and is no sample.
    """
    exporters = [name for receiver in receivers for name in receiver.exporters]
    for _ in range(TRIES):
        watch.until_empty(exporters, dict.fromkeys(exporters, 0.0))
        page = watch.look().page
        found = balance(receivers, page)
        after = watch.look().page
        if all(figure(page, "sent_total", name) == figure(after, "sent_total", name) for name in exporters):
            break
    return found


def balance(receivers: Sequence[Receiver], page: dict[str, float]) -> dict[str, Any]:
    """Return for each receiver what the collector counts and what it holds."""
    found: dict[str, Any] = {}
    for receiver in receivers:
        counted = {
            name: round(sum(figure(page, f"{name}_total", exporter) for exporter in receiver.exporters))
            for name in ("sent", "dropped", "refused")
        }
        held = receiver.held()
        found[receiver.name] = counted | {"held": held, "lost": max(0, counted["sent"] - held) + counted["dropped"]}
    return found


def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape = shape_of(given.gpus, min(GPUS_PER_STREAM, given.gpus))
    receivers: list[Receiver] = [kind(folder) for kind in (Prometheus, VictoriaMetrics, Otlp, Rsyslog)]
    found: dict[str, Any] = {"gpus": given.gpus, "cut_s": given.cut, "interval_s": given.interval}
    with contextlib.ExitStack() as stack:
        for receiver in receivers:
            stack.callback(receiver.close)
            receiver.start()
        collector = stack.enter_context(running(folder, shape, settings=settings_of(receivers, given.interval)))
        # The load ends when `loading` does; this is only the most that it could last.
        plan = Plan(shape, 1, 3.0, 5.0, 5, WARM_S + given.baseline + len(receivers) * (given.cut + BACK_S) + 600)
        generators, begin_s = stack.enter_context(loading(collector, plan))
        auditor = Auditor(collector, _api(folder))
        stack.callback(auditor.close)
        watch = Watch(collector, generators, begin_s)
        watch.wait(max(0.0, begin_s - time.time()) + WARM_S)
        found["baseline"] = seen(watch.wait(given.baseline), [n for r in receivers for n in r.exporters])
        found["cuts"] = {}
        for receiver in receivers:
            found["cuts"][receiver.name] = cut(watch, receivers, receiver, given.cut)
            print(json.dumps({receiver.name: found["cuts"][receiver.name]}), file=sys.stderr, flush=True)
        auditor.close()
        found["balance"] = balanced(receivers, watch)
        found["rejected"] = round(watch.moments[-1].total("rejected"))
        found["audit"] = {"made": auditor.made, "failed": auditor.failed}
    return found


def _api(folder: Path) -> str:
    """Return the Fleet API's address, from the collector's line that it is ready."""
    for line in (folder / "collector.log").read_text("utf-8", "replace").splitlines():
        if " is ready: " in line:
            return line.partition("Fleet API on ")[2].partition(",")[0]
    raise RuntimeError("the collector is not ready")


def lines_of(found: dict[str, Any]) -> list[str]:
    """Return the block of the evidence page."""
    columns = {"all there": found["baseline"], **{TITLES[name]: row for name, row in found["cuts"].items()}}
    lines = [
        f"One collector with {found['gpus']:,} GPUs at 1 Hz sends to four real receivers at once. Each in turn is",
        f"stopped for {found['cut_s']:g} s and started again. In the end what the receivers hold is counted.",
        f"`benchmarks/bench_standards_outage.py`, run on {when()}, 2 cores for all of it,",
        f"receivers and load included; load of the machine {found['load'][0]} before and {found['load'][1]} after.", "",
        "### What was lost", "",
        "| receiver | sent | it holds | dropped | refused | lost |", "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, row in found["balance"].items():
        lines.append(
            f"| {TITLES[name]} | {row['sent']:,} | {row['held']:,} | {row['dropped']:,} | {row['refused']:,} |"
            f" {row['lost']:,} |"
        )
    lines += ["", "Of remote_write and OTLP metrics these are samples and points, of syslog lines. A marker that",
              "ends a series, as where a job ends, counts as a sample.", "",
              "### While it was away", "",
              "| receiver | requests tried again | most that waited | its memory | taken after its return |",
              "| --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, row in found["cuts"].items():
        after = f"within {row['caught_up_s']:g} s" if row["caught_up_s"] is not None else f"not in {BACK_S:g} s"
        lines.append(
            f"| {TITLES[name]} | {row['tried_again']} | {row['waited_max']:,} | {row['waited_mib']} MiB | {after} |"
        )
    lines += ["", "### What else was slowed", "", f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for key, title in ROWS.items():
        lines.append(f"| {title} | {' | '.join(_text(row[key]) for row in columns.values())} |")
    lines += ["", "The last two are of the exporters whose receivers were there."]
    return lines


ROWS = {
    "samples_per_s": "samples acknowledged a second", "cores": "CPU of the collector, cores",
    "ack_median_s": "age of the oldest unacknowledged batch, s, median", "ack_max_s": "the same, at most",
    "tick_max_s": "detectors for 10 s of telemetry, s, at most", "status_median_ms": "answer of the API, ms, median",
    "rss_mib": "memory of the collector, MiB", "others_failures": "failed requests to the others",
    "others_waiting_max": "samples that waited for another, at most",
}  # fmt: skip


def _text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=5_000)
    parser.add_argument("--cut", type=float, default=600.0, help="seconds that each receiver is away")
    parser.add_argument("--baseline", type=float, default=120.0, help="seconds with all of them there")
    parser.add_argument("--interval", type=float, default=30.0, help="seconds between samples of each series")
    parser.add_argument("--no-write", action="store_true", help=f"do not write {PAGE.relative_to(ROOT)}")
    given = parser.parse_args(argv)
    load = [round(os.getloadavg()[0], 1)]
    with tempfile.TemporaryDirectory(prefix="drover-outage-", ignore_cleanup_errors=True) as name:
        found = run(given, Path(name))
    found["load"] = [*load, round(os.getloadavg()[0], 1)]
    print(json.dumps(found), flush=True)
    if not given.no_write:
        put(PAGE, "outage", lines_of(found))


if __name__ == "__main__":
    main()
