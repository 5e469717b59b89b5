"""A live simulated fleet with the faults that the nine tasks of docs/evidence/console-speed.md are about: 32 nodes in
four racks under two leafs, each a real agent's stream over gRPC, a real collector that asks a person before it drains,
a command in the scheduler's place, a price, and last week's history (`history.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import drover_collector
from drover_core.model.events import Incident, IncidentKind, from_json
from drover_core.model.fleet import dump_toml
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from drover_simulator.faults import Fault, dump_faults
from drover_simulator.fleet import build_fleet
from testbed.system_processes import free_port, reachable, running
from testbed.waiting import wait_until

NODES, SEED = 32, 7
SLOW, HOT, FAILED, FALLEN = ("r01n02", 3), ("r02n04", 5), ("r02n03", 2), ("r04n03", 1)
FLAPPING, LEAF = "r02n06", "leaf01"  # one node, not the switch above it
WARM_RACK = "r04"
PAST_S = 240.0  # a rack is warmer than it was: the detector learns 180 s of its air before it judges it
FREE = "r04n07"  # nobody's, and in service
EMPTY = "r04n06"  # nobody's; a person drains it, and it is well
FAULTS = [
    Fault("straggler", "power_cap", *SLOW, 5.0, None, 0.3),
    Fault("thermal", "cooling", *HOT, 5.0, None, 1.8, 10.0),
    Fault("thermal", "inlet", "r04n01", None, PAST_S, None, 11.0, 20.0),
    Fault("memory", "row_remap_failure", *FAILED, 8.0, None, 1.0),
    Fault("xid", "fallen_off_bus", *FALLEN, 10.0, None, 1.0),
    Fault("link", "ib_flap", FLAPPING, None, 8.0, None, 1.0),
]
FOUND_S = 900.0
# A warm rack and five more nodes in trouble: with the usual 0.7 the guard would hold each drain, also one by hand.
GUARD = "\n[guard]\nmin_healthy_ratio = 0.5\n"
SETTINGS = """[cost]
currency = "EUR"
gpu_hour = 2.5
[policy]
path = "{folder}/policy.toml"
[act]
mode = "approve"
validate = false
[act.command]
program = ["{python}", "{scheduler}", "{folder}/scheduler"]
"""


@dataclass
class Live:
    url: str
    api: str  # HOST:PORT of the Fleet API
    stub: FleetStub
    folder: Path
    job: str = ""  # that the slow GPU holds up
    serial: str = ""  # of the slow GPU

    def incidents(self) -> list[Incident]:
        reply = self.stub.ListIncidents(pb.ListIncidentsRequest(state="open"), timeout=20)
        return [from_json(Incident, text) for text in reply.incidents_json]

    def found(self, fits: Callable[[Incident], bool]) -> Incident | None:
        return next((i for i in self.incidents() if fits(i)), None)

    def pending(self) -> list[str]:
        return list(self.stub.GetPolicy(pb.PolicyRequest(), timeout=20).pending_json)


def _answers(stub: FleetStub) -> bool:
    try:
        return bool(stub.GetStatus(pb.StatusRequest(), timeout=2))
    except grpc.RpcError:
        return False


EXPECTED: dict[str, Callable[[Incident], bool]] = {
    "the slow GPU": lambda i: i.kind is IncidentKind.STRAGGLER and (i.node, i.gpu) == SLOW and i.job is not None,
    "the poorly cooled GPU": lambda i: i.kind is IncidentKind.THERMAL and i.node == HOT[0],
    "the warm rack": lambda i: i.kind is IncidentKind.THERMAL and i.scope == "rack",
    "the failed remap": lambda i: i.kind is IncidentKind.MEMORY and i.node == FAILED[0],
    "the flapping port": lambda i: i.kind is IncidentKind.LINK and i.node == FLAPPING,
    "the GPU off its bus": lambda i: i.kind is IncidentKind.XID and i.node == FALLEN[0],
}


@contextmanager
def live(folder: Path) -> Iterator[Live]:
    """The fleet, once all that is EXPECTED was found, a node is drained by hand and probed, and a drain waits."""
    (folder / "scheduler").mkdir()
    scheduler = ROOT / "tests" / "testbed" / "command_scheduler.py"
    settings = SETTINGS.format(python=sys.executable, scheduler=scheduler, folder=folder)
    agents, api, port = (free_port() for _ in range(3))
    preset = Path(drover_collector.__file__).parent / "policy" / "presets" / "nvidia.toml"
    (folder / "policy.toml").write_text(preset.read_text().replace('mode = "observe"', 'mode = "approve"') + GUARD)
    (folder / "fleet.toml").write_text(dump_toml(build_fleet(NODES, SEED)))
    (folder / "faults.json").write_text(dump_faults(FAULTS))
    (folder / "collector.toml").write_text(
        f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "chdb://{folder}/store"\n'
        f'[ingest]\nlisten = "127.0.0.1:{agents}"\n[api]\nlisten = "127.0.0.1:{api}"\n{settings}'
    )
    path = os.environ | {"PYTHONPATH": os.pathsep.join([f"{ROOT}/benchmarks", os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-m", "console.history", f"chdb://{folder}/store"], check=True, env=path)
    with ExitStack() as stack:
        stack.enter_context(running(folder, "drover_collector.main", "run", "--config", f"{folder}/collector.toml"))
        channel = grpc.insecure_channel(f"127.0.0.1:{api}", [("grpc.max_reconnect_backoff_ms", 1000)])
        stub = FleetStub(stack.enter_context(channel))
        wait_until(partial(_answers, stub), "the collector answers", 120)
        options = ["--collector", f"127.0.0.1:{api}", "--port", str(port)]
        stack.enter_context(running(folder, "drover_dashboard.main", *options))
        stack.enter_context(
            running(
                folder, "drover_agent.main", "fleet", "--collector", f"127.0.0.1:{agents}", "--interval", "5",
                "--fleet", f"{folder}/fleet.toml", "--spool-dir", f"{folder}/spool", "--seed", str(SEED),
                "--faults", f"{folder}/faults.json",
            )
        )  # fmt: skip
        made = Live(f"http://127.0.0.1:{port}", f"127.0.0.1:{api}", stub, folder)
        wait_until(partial(reachable, "127.0.0.1", port), "the console listens", 60)
        wait_until(lambda: stub.GetStatus(pb.StatusRequest(), timeout=20).newest_tick_ms, "a bucket is judged", 120)
        _put_aside(stub)
        for what, fits in EXPECTED.items():
            wait_until(partial(made.found, fits), f"{what} is found", FOUND_S)
        wait_until(made.pending, "a drain waits for a person", FOUND_S)
        slow = made.found(EXPECTED["the slow GPU"])
        made.job = (slow.job if slow else None) or ""
        gpus = stub.GetNode(pb.NodeRequest(node=SLOW[0]), timeout=20).gpus
        made.serial = next(gpu.serial for gpu in gpus if gpu.gpu == SLOW[1])
        yield made


def _put_aside(stub: FleetStub) -> None:
    """One empty node by hand, and probed: it is well."""
    act = pb.ActRequest(node=EMPTY, act="drain", why="fan replaced, ticket 4502", who="kim@example.com", force=True)
    stub.ActOnNode(act, timeout=30)
    wait_until(lambda: _stage(stub) == "drained", f"{EMPTY} is drained", 60)
    order = stub.RequestProbe(pb.ProbeAsk(node=EMPTY, why="after the repair", who="kim@example.com"), timeout=30).id
    wait_until(lambda: _verdicts(stub, order), f"{EMPTY} is probed", 240)


def _stage(stub: FleetStub) -> str:
    duties = stub.ListActions(pb.ActionsRequest(node=EMPTY), timeout=20).duties
    return duties[0].stage if duties else ""


def _verdicts(stub: FleetStub, order: str) -> bool:
    found = stub.ListProbeOrders(pb.ProbeOrdersRequest(id=order), timeout=20).orders
    return any(row.verdicts_json for row in found)
