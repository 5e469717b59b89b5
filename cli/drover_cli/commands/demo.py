"""`drover demo`: the main job in one command: a simulated fleet with faults, the collector, the console."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc

from drover_cli.arguments import count, finite
from drover_cli.client import FleetClient
from drover_cli.demo.act import (
    SCHEDULER,
    SOCKET,
    Guide,
    policy,
    settings,
)
from drover_cli.demo.processes import ChildError, Processes, free_port
from drover_cli.errors import CliError
from drover_cli.extras import needs
from drover_cli.output import plain, print_json, where
from drover_core.model.events import Incident, Severity, from_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "a simulated fleet with faults, the collector and the console, on this machine"
READY_S = 90.0
SUMMARY_S = 190.0  # a silent node, which comes as the first fault, is reported after 150 s
CALL_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=count, default=32, help="nodes of 8 GPUs (default 32, at least 8)")
    parser.add_argument("--seconds", type=finite, default=0.0, help="end after so long (default: on Ctrl-C)")
    parser.add_argument("--no-dashboard", action="store_true", help="without the console")
    parser.add_argument("--seed", type=int, default=7, help="which fleet and which GPUs fail (default 7)")
    parser.add_argument("--faults", default="demo", metavar="demo|none|FILE", help="what to inject (default demo)")
    parser.add_argument(
        "--dir", type=Path, help="folder for store, logs and labels, kept at the end (default: temporary)"
    )
    parser.add_argument(
        "--act",
        action="store_true",
        help="Drover acts when you say so, through a stand-in for a scheduler: approve, drain, reboot and resume",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object at the end on stdout, all else on stderr")


def run(args: argparse.Namespace) -> int:
    if args.nodes < 8:
        raise CliError("--nodes must be at least 8: the five faults need nodes of their own and healthy peers")
    if args.seconds < 0:
        raise CliError("--seconds must be 0 or more")
    if args.faults not in ("demo", "none"):
        args.faults = str(Path(args.faults).resolve())  # the fleet runs in a folder of its own
        if not Path(args.faults).is_file():
            raise CliError(f"--faults: there is no file {args.faults}; give a JSON file of faults, demo or none")
    with needs("collector,dashboard,simulation"):
        for module in ("drover_collector.main", "drover_simulator.live_fleet", "streamlit"):
            import_module(module)
    signal.signal(signal.SIGTERM, _interrupt)  # else the children, in sessions of their own, would outlive us
    with _folder(args.dir) as folder, Processes(folder) as processes:
        demo = _Demo(args, folder, processes)
        try:
            return demo.run()
        except ChildError as error:
            demo.stay(error)
            raise CliError(f"{error}\nthe logs are kept in {folder}; remove it when you have read them") from None


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is None:
        made = Path(tempfile.mkdtemp(prefix="drover-demo-"))
        try:
            yield made
        except KeyboardInterrupt:
            shutil.rmtree(made, ignore_errors=True)
            raise
        shutil.rmtree(made, ignore_errors=True)  # not after a failure: its logs say why
        return
    try:
        given.mkdir(parents=True, exist_ok=True)
        if any(given.iterdir()):
            raise CliError(f"{given} is not empty; give a new folder with --dir, or remove it first")
        with tempfile.TemporaryFile(dir=given):  # else the first file of the demo ends it with a traceback
            pass
    except OSError as error:
        raise CliError(f"{given}: {error.strerror}; choose a folder that can be written") from None
    yield given.resolve()


class _Demo:
    def __init__(self, args: argparse.Namespace, folder: Path, processes: Processes) -> None:
        self.args = args
        self.folder = folder
        self.processes = processes
        self.labels_file = folder / "labels.jsonl"
        self.started = 0.0
        self.seen: dict[str, tuple[Severity, str]] = {}
        self.injected: set[str] = set()
        self.guide_shown = False
        self.away = False
        self.console = ""
        self.guide: Guide | None = None
        self.strangers: set[str] = set()
        self.summaries: dict[str, str] = {}
        self.troubles: list[str] = []

    def say(self, text: str) -> None:
        print(text, file=sys.stderr if self.args.json else sys.stdout, flush=True)

    def run(self) -> int:
        from drover_core.model.fleet import dump_toml
        from drover_simulator.fleet import build_fleet

        api, console = free_port(7302), free_port(8501)
        spec = build_fleet(self.args.nodes, self.args.seed)
        if self.args.act:
            spec = replace(spec, name=f"{spec.name} ({SCHEDULER})")
            (self.folder / "policy.toml").write_text(policy(), "utf-8")
        (self.folder / "fleet.toml").write_text(dump_toml(spec), "utf-8")
        (self.folder / "collector.toml").write_text(
            f'fleet = "{self.folder}/fleet.toml"\n[store]\nurl = "chdb://{self.folder}/store"\n'
            f'[ingest]\nlisten = "127.0.0.1:0"\n[api]\nlisten = "127.0.0.1:{api}"\n'
            + (settings(self.folder) if self.args.act else ""),
            "utf-8",
        )
        self.say(
            f"drover demo: {len(spec.nodes)} simulated nodes, {spec.gpu_count} GPUs; store and logs in {self.folder}"
        )
        self.processes.start("collector", "drover_collector.main", "run", "--config", f"{self.folder}/collector.toml")
        soon = [("grpc.max_reconnect_backoff_ms", 1000)]  # else a start of 30 s is seen after 43 s
        with grpc.insecure_channel(f"127.0.0.1:{api}", soon) as channel:
            fleet = FleetClient(channel)
            self._wait("the collector", lambda: bool(fleet.call(methods.GET_STATUS, pb.StatusRequest(), 2)))
            # A free port, as others' agents may send to the usual one.
            agents = int(fleet.call(methods.GET_SYSTEM, pb.SystemRequest(), CALL_S).agents_address.rpartition(":")[2])
            if not self.args.no_dashboard:
                self.processes.start(
                    "dashboard", "drover_dashboard.main", "--collector", f"127.0.0.1:{api}", "--port", str(console)
                )
                self._wait("the console", lambda: _answers(f"http://127.0.0.1:{console}/_stcore/health"))
                self.console = f"http://127.0.0.1:{console}"
                self.say(f"console:     {self.console}")
            self.say(f"command line: drover status --collector 127.0.0.1:{api}")
            self.processes.start(
                "fleet", "drover_agent.main", "fleet", "--collector", f"127.0.0.1:{agents}",
                "--nodes", str(self.args.nodes), "--seed", str(self.args.seed), "--faults", self.args.faults,
                "--labels", str(self.labels_file), "--spool-dir", f"{self.folder}/spool",
                *(["--scheduler", SOCKET] if self.args.act else []),
            )  # fmt: skip
            self._wait("the fleet", lambda: fleet.call(methods.GET_STATUS, pb.StatusRequest(), 2).nodes_reporting > 0)
            self.started = time.monotonic()
            self.say(
                "the fleet streams; faults begin in the next minute" + ("" if self.args.seconds else ", Ctrl-C ends")
            )
            if self.args.act:
                self.guide = Guide(self._line, spec, f"127.0.0.1:{api}")
                self.guide.begin(self.console)
            self._watch(fleet)
            try:
                return self._summary(fleet)
            except grpc.RpcError as error:
                raise ChildError(f"the collector does not answer ({error.code().name.lower()}): no summary") from None

    def stay(self, error: ChildError) -> None:
        """Keep the console up after a part has ended, until Ctrl-C: it shows what the fleet's users would see."""
        if not self.console or self.args.seconds or self.args.json or not self.processes.runs("dashboard"):
            return
        self.say(f"failed: {error}")
        self.say(f"The console stays up at {self.console}, to show how this looks there. Logs are in {self.folder}.")
        self.say("Ctrl-C ends")
        with contextlib.suppress(KeyboardInterrupt):
            while self.processes.runs("dashboard"):
                time.sleep(0.5)

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            self.processes.check()
            with contextlib.suppress(grpc.RpcError):
                if ready():
                    return
            time.sleep(0.2)
        raise ChildError(f"{what} was not ready within {READY_S:.0f} s; logs are in {self.folder}")

    def _watch(self, fleet: FleetClient) -> None:
        """Show what happens until the time is over or Ctrl-C."""
        next_status = self.started + 10
        with contextlib.suppress(KeyboardInterrupt):
            while not self.args.seconds or time.monotonic() < self.started + self.args.seconds:
                self.processes.check()
                self._show_injected()
                try:
                    self._show_incidents(fleet)
                    if self.guide is not None:
                        self.guide.look(fleet, self._labels(), self.summaries)
                    if time.monotonic() >= next_status:
                        next_status = time.monotonic() + 10
                        self._show_status(fleet)
                    self.away = False
                except (
                    grpc.RpcError
                ) as error:  # a stopped or overloaded collector comes back; one that ended is reported above
                    if not self.away:
                        self._line(f"the collector does not answer ({error.code().name.lower()}); going on asking")
                    self.away = True
                time.sleep(0.5)

    def _show_status(self, fleet: FleetClient) -> None:
        status = fleet.call(methods.GET_STATUS, pb.StatusRequest(), CALL_S)
        health = ", ".join(f"{n} {name}" for name, n in sorted(status.gpus_by_health.items()) if n)
        nodes = f"{status.nodes_reporting}/{status.nodes_expected} nodes"
        self._line(f"{nodes}, GPUs: {health}, {status.samples_stored:,} samples")
        for node in sorted(set(status.unknown_nodes) - self.strangers):
            self.strangers.add(node)
            self._line(f"stranger   {plain(node)} sends to this demo and is not part of it: stop its agent")
        for trouble in status.troubles:
            if trouble not in self.troubles:
                self._line(f"trouble    {plain(trouble)}")
        self.troubles = list(status.troubles)
        if not self.args.seconds and not self.guide_shown and time.monotonic() > self.started + SUMMARY_S:
            self.guide_shown = True
            self._print_summary(self._result(fleet))

    def _line(self, text: str) -> None:
        self.say(f"{time.monotonic() - self.started:5.0f} s  {text}")

    def _labels(self) -> list[dict[str, Any]]:
        if not self.labels_file.exists():
            return []
        return [
            json.loads(line)
            for line in self.labels_file.read_text("utf-8").splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def _show_injected(self) -> None:
        for label in self._labels():
            if label["id"] not in self.injected:
                self.injected.add(label["id"])
                at = f"{label['node']}" + (f" GPU {label['gpu']}" if label.get("gpu") is not None else "")
                self._line(f"injected   {label['kind']}, {label['cause']}, on {at}")

    def _incidents(self, fleet: FleetClient) -> list[Incident]:
        reply = fleet.call(methods.LIST_INCIDENTS, pb.ListIncidentsRequest(state="all", limit=10_000), CALL_S)
        return [from_json(Incident, text) for text in reply.incidents_json]

    def _show_incidents(self, fleet: FleetClient) -> None:
        for i in sorted(self._incidents(fleet), key=lambda i: i.opened_ms):
            state = (i.severity, i.action.value)
            self.summaries[i.id] = i.summary
            if self.seen.get(i.id) != state:
                word = "incident" if i.id not in self.seen else "changed "
                self.seen[i.id] = state
                self._line(f"{word}   {i.severity} {i.kind}, {plain(i.cause)}, on {plain(where(i))} [{i.id}]")
                self._line(f"           {plain(i.summary)} Wants: {i.action}.")

    def _result(self, fleet: FleetClient) -> dict[str, Any]:
        from drover_cli.commands.score import report
        from drover_cli.scoring.score import found_of, label_of, score
        from drover_core.model.reports import incident_report

        labels = [label_of(row) for row in self._labels()]
        found = [found_of(incident_report(i)) for i in self._incidents(fleet)]
        result = score(labels, found, 0.0)
        status = fleet.call(methods.GET_STATUS, pb.StatusRequest(), CALL_S)
        full = report(result)
        return {
            "injected": result.faults,
            "found": result.found,
            "false_incidents": len(result.false) + result.duplicates,  # a second incident for one fault is one too many
            "samples": status.samples_stored,
            "seconds": round(time.monotonic() - self.started, 1),
            "delay_median_s": full["delay_median_s"],
            "delay_max_s": max(result.delays_s, default=None),
            "missed": [
                row | {"after_s": round(time.time() - label.start_ms / 1000)}
                for label, row in zip(result.missed, full["missed"], strict=True)
            ],
            "false": full["false_incidents"],
        }

    def _print_summary(self, result: dict[str, Any]) -> None:
        for line in summary_lines(result):
            self._line(line)

    def _summary(self, fleet: FleetClient) -> int:
        result = self._result(fleet)
        self._print_summary(result)
        if self.args.json:
            print_json(result)
        return 0 if result["found"] == result["injected"] and not result["false_incidents"] else 1


def summary_lines(result: dict[str, Any]) -> list[str]:
    """Return what a demo found. Of a fault that it did not find it is said how long it had: a hang takes 90 s."""
    return [
        f"{result['found']} of {result['injected']} faults found, {result['false_incidents']} false incidents, "
        f"{result['samples']:,} samples",
        *(
            f"not found  {row['kind']}, {row['cause']}, in the {row['after_s']:,} s since it was injected"
            for row in result["missed"]
        ),
        *(f"false      {row['kind']}, {row['cause']} on {row['members']}" for row in result["false"]),
    ]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:  # noqa: S310  # always http on loopback, written above
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
