"""Real agents, each a process, against a real collector: no GPU, eight GPUs on the C stand-in, the kernel log."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_proto import fleet_pb2 as pb
from drover_proto.catalog import BY_NAME, Scope, of_scope
from drover_proto.events import Incident, from_json
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.nvml import FakeNvml, build
from testbed.nvml_values import GPUS, READ_BY_NVML, feed_distinct
from testbed.system_processes import Collector, collector, running
from testbed.waiting import wait_until

NODE = "real-node"
CALL_S = 10.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Collector]:
    with collector(tmp_path, f'[[nodes]]\nnames = "{NODE}"\nrack = "r1"\nsku = "H100-SXM"\ngpus = {GPUS}\n') as found:
        yield found


def agent_args(tmp_path: Path, address: str, *settings: str) -> list[str]:
    args = [
        "run",
        "--set",
        f"node={NODE}",
        "--set",
        f'collectors=["{address}"]',
        "--set",
        f"spool.dir={tmp_path}/spool",
    ]
    args += ["--set", "batch_s=1"]
    for one in settings:
        args += ["--set", one]
    return args


def detail(stub: FleetStub) -> pb.NodeDetail:
    return stub.GetNode(pb.NodeRequest(node=NODE), timeout=CALL_S)


def test_a_machine_without_gpu_streams_its_host_and_says_why_there_is_no_gpu(tmp_path: Path, served: Collector) -> None:
    address, _, stub = served
    env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    args = agent_args(tmp_path, address, "kmsg_enabled=false", "hardware=nvml")
    with running(tmp_path, "drover_agent.main", *args, env=env):
        wait_until(lambda: any(v.present for v in detail(stub).values), "host values arrive")
        found = detail(stub)
    values = {v.metric: v for v in found.values}
    assert values["memory_total_bytes"].value == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    assert "NVIDIA driver" in found.inventory["no_gpu_reason"]
    assert len(found.gpus) == GPUS, "the GPUs that should be there are shown"
    for gpu in found.gpus:
        assert gpu.health != "healthy"
        assert not any(v.present for v in gpu.values)


def test_every_value_of_eight_gpus_arrives_in_its_own_column(tmp_path: Path, served: Collector) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("the stand-in for NVML is compiled with gcc: apt-get install gcc libc6-dev")
    fake = FakeNvml(tmp_path / "nvml.script", build(tmp_path))
    fake.healthy(GPUS)
    expected = feed_distinct(fake)
    address, _, stub = served
    names = {m.name for m in READ_BY_NVML}
    args = agent_args(tmp_path, address, "kmsg_enabled=false")
    with running(tmp_path, "drover_agent.main", *args, env={**os.environ, **fake.env()}):

        def complete() -> bool:
            gpus = detail(stub).gpus
            return len(gpus) == GPUS and all(names <= {v.metric for v in g.values if v.present} for g in gpus)

        wait_until(complete, "all metrics of all GPUs arrive", 40)
        found = detail(stub)
    for gpu, want in zip(found.gpus, expected, strict=True):
        got = {v.metric: v.value for v in gpu.values if v.present}
        for name, value in want.items():
            assert got[name] == pytest.approx(value, abs=BY_NAME[name].step / 2 + 1e-12), (gpu.gpu, name)
        assert gpu.serial and gpu.uuid and gpu.pci and gpu.model
    assert {m.name for m in of_scope(Scope.GPU)} == names, "NVML and GPM give every GPU row of the catalog"


@pytest.mark.system
def test_a_line_in_the_kernel_log_becomes_an_incident(tmp_path: Path, served: Collector) -> None:
    address, _, stub = served
    args = agent_args(tmp_path, address, "hardware=none", "kmsg_accept_user_facility=true")

    def incidents() -> list[Incident]:
        reply = stub.ListIncidents(pb.ListIncidentsRequest(state="all"), timeout=CALL_S)
        return [from_json(Incident, text) for text in reply.incidents_json]

    def told() -> list[Incident]:
        return [i for i in incidents() if i.cause == "xid_79" and i.severity == "critical"]

    with running(tmp_path, "drover_agent.main", *args):
        wait_until(lambda: detail(stub).row.last_seen_ms, "the agent streams")
        line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=drover-test, GPU has fallen off the bus."
        with Path("/dev/kmsg").open("w") as kernel_log:
            kernel_log.write(f"<4>{line}\n")
        wait_until(told, "the line becomes an incident")
        found = told()
        events = [json.loads(text) for text in detail(stub).events_json]
    assert len(found) == 1
    assert found[0].node == NODE
    assert any("drover-test" in e.text for e in found[0].evidence)
    # lines of earlier runs are still in the log: they come as backlog, and alone they alarm nobody
    assert [e["code"] for e in events if e["kind"] == "xid" and not e["backlog"]] == ["79"]


@pytest.mark.system
def test_a_line_that_user_space_could_have_forged_is_kept_but_not_acted_on(tmp_path: Path, served: Collector) -> None:
    address, _, stub = served
    with running(tmp_path, "drover_agent.main", *agent_args(tmp_path, address, "hardware=none")):
        wait_until(lambda: detail(stub).row.last_seen_ms, "the agent streams")
        with Path("/dev/kmsg").open("w") as kernel_log:
            kernel_log.write("<4>NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=drover-forged, GPU has fallen off.\n")
        wait_until(lambda: any("drover-forged" in text for text in detail(stub).events_json), "the event is kept")
        reply = stub.ListIncidents(pb.ListIncidentsRequest(state="all", min_severity="warning"), timeout=CALL_S)
    assert not [text for text in reply.incidents_json if "xid_79" in text]
