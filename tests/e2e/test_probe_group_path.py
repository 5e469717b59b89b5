"""Two nodes probed together, with the real parts: collector, agents and probe services, each a process, and torch's
own collectives (gloo) over loopback. What is fake: both nodes are this machine, and have no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from drover_core.model.events import (
    ProbeOrder,
    ProbeResult,
    ProbeVerdict,
    from_json,
)
from drover_core.model.probe_figures import GROUP_FIGURES
from drover_proto import fleet_pb2 as pb
from testbed.system_processes import Collector, collector, free_port, running
from testbed.waiting import wait_until

NODES = ("r1n1", "r1n2")
FLEET = "".join(
    f'[[nodes]]\nnames = "{node}"\nrack = "r1"\nleaf = "l1"\nsku = "H100-SXM"\ngpus = 8\n' for node in NODES
)
AGENT = {"kmsg_enabled": "false", "hardware": "none", "steps_socket": "", "batch_s": "1"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Collector]:
    port = free_port()
    with collector(tmp_path, FLEET, f'[probes]\ngroup_ports = "{port}-{port}"\ngroup_join_s = 60.0') as found:
        yield found


def agent_args(node: str, folder: Path, address: str, **more: str) -> list[str]:
    settings = AGENT | {"node": node, "collectors": f'["{address}"]', "spool.dir": str(folder / "spool")} | more
    return ["run", *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]


def test_two_agents_meet_over_loopback_and_their_figures_are_judged_together(served: Collector, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="probes need torch: pip install 'drover[probe]'")
    with ExitStack() as stack:
        for number, node in enumerate(NODES):
            (tmp_path / node).mkdir()
            # One says where it is reached; of the other, whence its stream comes is taken.
            options = {"probe_address": "127.0.0.1"} if number else {}
            args = agent_args(node, tmp_path / node, served.agents, **options)
            stack.enter_context(running(tmp_path / node, "drover_agent.main", *args))

        def both() -> bool:
            return served.stub.GetStatus(pb.StatusRequest(), timeout=120).nodes_reporting == 2

        wait_until(both, "both agents")
        ask = pb.ProbeAsk(group=NODES, why="a test of the fabric")
        orders = list(served.stub.RequestProbe(ask, timeout=120).ids)
        for node in NODES:  # as systemd does when a request lies there
            folder = tmp_path / node / "spool/probes"
            wait_until(lambda f=folder: list((f / "requests").glob("*.json")), f"the request at {node}")  # type: ignore[misc]  # bound now
            serve = [sys.executable, "-m", "drover_agent.main", "probe", "--serve", str(folder)]
            service = subprocess.Popen(serve, stderr=subprocess.DEVNULL)
            stack.callback(service.wait, 30)
            stack.callback(service.terminate)

        def row(order: str) -> pb.ProbeOrderRow:
            (found,) = served.stub.ListProbeOrders(pb.ProbeOrdersRequest(id=order), timeout=120).orders
            return found

        def state(order: str) -> str:
            return from_json(ProbeOrder, row(order).order_json).state

        wait_until(lambda: {state(order) for order in orders} <= {"done", "failed"}, "the orders' end")
        rows = [row(order) for order in orders]
        ended = [from_json(ProbeOrder, one.order_json) for one in rows]
        results = [[from_json(ProbeResult, text) for text in one.results_json] for one in rows]
        assert [(o.node, o.state, o.detail) for o in ended] == [(node, "done", "") for node in NODES], results
        assert {(o.members, o.addresses) for o in ended} == {(NODES, ("127.0.0.1", "127.0.0.1"))}
        for of_node in results:
            figures = {r.probe: r.value for r in of_node if not r.end}
            assert set(figures) == set(GROUP_FIGURES)
            assert all(value and value > 0 for value in figures.values()), of_node
            assert {r.detail for r in of_node if not r.end} == {"1024 KiB over 2 ranks"}
        verdicts = [from_json(ProbeVerdict, text) for one in rows for text in one.verdicts_json]
        assert [(v.node, v.gpu, v.passed) for v in verdicts] == [(node, None, None) for node in NODES]
        assert all("CPUs were measured" in v.text for v in verdicts), "nobody takes loopback for a fabric"
    with pytest.raises(grpc.RpcError, match="a group has 2 to 256 nodes"):
        served.stub.RequestProbe(pb.ProbeAsk(group=NODES[:1]), timeout=120)
