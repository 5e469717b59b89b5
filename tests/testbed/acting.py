"""Collectors that act on a real Slurm, as processes, and what their Fleet API says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc

from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.slurm import Slurm
from testbed.system_processes import SOON, free_port, running
from testbed.waiting import wait_until

CALL_S = 120.0  # an act is answered within 8 s
# Tests drain most of a small fleet: the guard's own tests hold it against its limits.
POLICY = """name = "test"
mode = "enforce"
[guard]
fleet_ratio = 1.0
pool_ratio = 1.0
rack_ratio = 1.0
leaf_ratio = 1.0
min_healthy_ratio = 0.0
per_hour = 0
cooldown_s = 0
mass_nodes = 0
gap_ratio = 0
[[rules]]
name = "fatal XID"
kind = ["xid"]
severity = ["critical"]
action = "drain"
"""


class Acting(NamedTuple):
    agents: str  # address for agents
    log: Path
    stub: FleetStub

    def role(self) -> str:
        try:
            return self.stub.GetStatus(pb.StatusRequest(), timeout=10).role
        except grpc.RpcError:
            return ""

    def act(self, act: str, node: str, why: str, force: bool = False) -> pb.ActReply:
        return self.stub.ActOnNode(pb.ActRequest(node=node, act=act, why=why, force=force), timeout=CALL_S)

    def reports(self, node: str, since_ms: int) -> bool:
        """Whether values of the node have come: its agent's first tick is over, with its look at the kernel log."""
        found = self.stub.GetNode(pb.NodeRequest(node=node), timeout=120)
        return any(value.present and value.ts_ms > since_ms for value in found.values)

    def actions(self, node: str) -> list[pb.ActionLine]:
        return list(self.stub.ListActions(pb.ActionsRequest(node=node), timeout=CALL_S).actions)

    def stage(self, node: str) -> str:
        duties = self.stub.ListActions(pb.ActionsRequest(node=node), timeout=CALL_S).duties
        return duties[0].stage if duties else ""


@contextlib.contextmanager
def acting(folder: Path, slurm: Slurm, store: str = "", settings: str = "", policy: str = POLICY) -> Iterator[Acting]:
    """One in enforce mode. `store`: its url; empty: embedded. `settings`: further tables of its file."""
    folder.mkdir(exist_ok=True)
    agents, api = (f"127.0.0.1:{free_port()}" for _ in range(2))
    nodes = "".join(f'[[nodes]]\nnames = "{node}"\nrack = "r1"\nsku = "H100-SXM"\ngpus = 8\n' for node in slurm.nodes)
    (folder / "fleet.toml").write_text(nodes)
    (folder / "policy.toml").write_text(policy)
    (folder / "collector.toml").write_text(
        f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "{store or f"chdb://{folder}/store"}"\n'
        f'[ingest]\nlisten = "{agents}"\n[api]\nlisten = "{api}"\n[policy]\npath = "{folder}/policy.toml"\n'
        f'[act]\nmode = "enforce"\n[act.slurm]\nenabled = true\nconf = "{slurm.folder}/slurm.conf"\ntimeout_s = 5\n'
        f"{settings}"
    )
    module = "drover_collector.main"
    with (
        running(folder, module, "run", "--config", str(folder / "collector.toml")) as log,
        grpc.insecure_channel(api, SOON) as channel,
    ):
        made = Acting(agents, log, FleetStub(channel))
        wait_until(made.role, "the collector answers")
        yield made
