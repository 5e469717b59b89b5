"""A console as operators have it: 256 simulated nodes with faults, a collector that asks a person before it acts, and a
proxy that names people."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

import drover_collector
from drover_core.model.events import Incident, from_json
from drover_core.model.fleet import dump_toml
from drover_dashboard.client import FleetClient
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from drover_simulator.faults import Fault, dump_faults
from drover_simulator.fleet import build_fleet
from testbed.fleet_proxy import Between, between
from testbed.system_processes import SOON, free_port, reachable, running
from testbed.waiting import wait_until

TESTS = Path(__file__).resolve().parents[1]
POLICY = Path(drover_collector.__file__).parent / "policy" / "presets" / "nvidia.toml"
NODES, PROBED, INTERVAL_S = 256, 16, 5.0
OPERATOR, VIEWER = "alex@example.com", "kim@example.com"
STOP_S = 300.0
FOUND_S = 400.0
# The slow GPU is in another job than the rest: so that is what the job's page names.
RED, SLOW, HOT, FLAPPING = ("r02n03", 2), ("r09n02", 3), ("r02n01", 5), "r01n05"
FAULTS = MEMORY, STRAGGLER, THERMAL, LINK = [
    Fault("memory", "row_remap_failure", *RED, 5.0, None, 1.0),
    Fault("straggler", "power_cap", *SLOW, 5.0, None, 0.3),
    Fault("thermal", "cooling", *HOT, 5.0, None, 1.8, 10.0),
    Fault("link", "ib_flap", FLAPPING, None, 5.0, None, 1.0),
]
SETTINGS = """[cost]
currency = "EUR"
gpu_hour = 2.5
[act]
mode = "approve"
validate = false
[act.command]
program = ["{python}", "{scheduler}", "{folder}/scheduler"]
[policy]
path = "{folder}/policy.toml"
"""


class Collector:
    """One that can be killed with -9 and started again on its store."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.agents, self.api = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        (folder / "collector.toml").write_text(
            f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "chdb://{folder}/store"\n{settings}\n'
            f'[ingest]\nlisten = "{self.agents}"\n[api]\nlisten = "{self.api}"\n'
        )
        self._channel = grpc.insecure_channel(self.api, SOON)
        self.stub = FleetStub(self._channel)

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()
        self._end(signal.SIGTERM)

    def start(self) -> None:
        with (self._folder / "collector.log").open("a") as output:
            config = str(self._folder / "collector.toml")
            command = [sys.executable, "-m", "drover_collector.main", "run", "--config", config]
            self._child = subprocess.Popen(command, stdout=output, stderr=output)
        wait_until(self.answers, "the collector answers")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def answers(self) -> bool:
        try:
            return bool(self.stub.GetStatus(pb.StatusRequest(), timeout=10))
        except grpc.RpcError:
            return False

    def _end(self, by: signal.Signals) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.send_signal(by)
            child.wait(STOP_S)


@dataclass
class Console:
    """`fleet` and `served` ask the collector itself; the console asks it through `way`. `nodes`: their names; `probed`:
    the last 16 of them, which have results of probes."""

    url: str
    fleet: FleetClient
    served: Collector
    way: Between
    log: Path
    nodes: list[str]
    probed: list[str]

    def incident(self, fault: Fault) -> Incident:
        """The open incident of a fault, once it is found. (A remap that failed is reported by XIDs too.)"""
        kinds = {fault.kind, "xid"} if fault.kind == "memory" else {fault.kind}

        def found() -> list[Incident]:
            answer = self.fleet.incidents("open", node=fault.node).value
            known = [from_json(Incident, text) for text in answer.incidents_json] if answer else []
            return [i for i in known if i.node == fault.node and i.kind in kinds]

        wait_until(lambda: bool(found()), f"{fault.kind} of {fault.node} is found", FOUND_S)
        return found()[0]

    def confirmed(self, node: str, gpu: int) -> bool:
        detail = self.fleet.node(node).value
        return detail is not None and detail.gpus[gpu].health == "confirmed"

    def stage(self, node: str) -> str:
        duties = self.served.stub.ListActions(pb.ActionsRequest(node=node), timeout=120).duties
        return duties[0].stage if duties else ""


@contextmanager
def console(folder: Path, nodes: int = NODES) -> Iterator[Console]:
    """Collector, simulated fleet and console, each a process of its own, in `folder`. The faults begin 5 s later."""
    (folder / "scheduler").mkdir()
    (folder / "policy.toml").write_text(POLICY.read_text("utf-8").replace('mode = "observe"', 'mode = "approve"'))
    (folder / "faults.json").write_text(dump_faults(FAULTS))
    scheduler = TESTS / "testbed" / "command_scheduler.py"
    settings = SETTINGS.format(python=sys.executable, scheduler=scheduler, folder=folder)
    spec, port = build_fleet(nodes, 7), free_port()
    names = [node.name for node in spec.nodes]
    probed = names[-PROBED:]
    (folder / "fleet.toml").write_text(dump_toml(spec))
    with ExitStack() as stack:
        served = stack.enter_context(Collector(folder, settings))
        address, way = stack.enter_context(between(served.api))
        log = stack.enter_context(
            running(
                folder, "drover_dashboard.main", "--collector", address, "--port", str(port), "--user-header", "X-User",
                "--trusted-proxy", "127.0.0.1", "--operator", OPERATOR,
            )
        )  # fmt: skip
        subprocess.run(
            [sys.executable, "-m", "testbed.probed", f"chdb://{folder}/store", str(folder / "fleet.toml"), *probed],
            check=True, timeout=120, env=os.environ | {"PYTHONPATH": str(TESTS)},
        )  # fmt: skip
        served.start()
        stack.enter_context(
            running(
                folder, "drover_agent.main", "fleet", "--collector", served.agents, "--fleet",
                str(folder / "fleet.toml"), "--spool-dir", str(folder / "spool"), "--faults",
                str(folder / "faults.json"), "--interval", f"{INTERVAL_S:g}",
            )
        )  # fmt: skip
        fleet = stack.enter_context(closing(FleetClient(served.api)))
        wait_until(lambda: reachable("127.0.0.1", port), "the console listens")
        yield Console(f"http://127.0.0.1:{port}", fleet, served, way, log, names, probed)
